"""Planning and `--help` answer at once: nothing heavy is imported before a command needs it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "optuna", "plotly", "pandas", "scipy", "sklearn", "moocore", "tokenizers", "transformers")


def modules_after(code: str) -> set[str]:
    """Run `code` in a fresh interpreter and return the top-level names it left in `sys.modules`."""
    program = f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stderr.split())


@pytest.mark.unit
def test_importing_the_cli_imports_nothing_heavy() -> None:
    assert modules_after("import autotune.cli").isdisjoint(HEAVY)


@pytest.mark.unit
def test_importing_autotune_itself_imports_nothing_at_all() -> None:
    assert modules_after("import autotune").isdisjoint({*HEAVY, "numpy", "pydantic", "typer", "engine"})


@pytest.mark.unit
def test_help_imports_nothing_heavy() -> None:
    code = """
sys.argv = ["autotune", "--help"]
from autotune.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
    assert modules_after(code).isdisjoint(HEAVY)
