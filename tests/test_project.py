"""What `pyproject.toml` and `constraints.txt` say about the project stays true and agrees with itself."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import autotune

pytestmark = pytest.mark.unit

PACKAGES = ("autotune", "engine", "search_spaces", "reports")


@pytest.fixture(scope="module")
def pyproject(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def contracts(pyproject: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The import contracts by name."""
    return {contract["name"]: contract for contract in pyproject["tool"]["importlinter"]["contracts"]}


@pytest.fixture(scope="module")
def light_modules(contracts: dict[str, dict[str, Any]]) -> list[str]:
    """The light modules of the engine, as the contract that keeps them light names them."""
    return next(c["source_modules"] for name, c in contracts.items() if name.startswith("Light modules"))


def test_version_comes_from_the_distribution(pyproject: dict[str, Any]) -> None:
    assert autotune.__version__ == pyproject["project"]["version"]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_ships_its_type_hints(repo_root: Path, package: str) -> None:
    assert (repo_root / package / "py.typed").is_file()


def test_every_direct_requirement_is_pinned_within_its_bounds(repo_root: Path, pyproject: dict[str, Any]) -> None:
    pins = {}
    for line in (repo_root / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line):
            pins[canonicalize_name(match[1])] = Version(match[2])
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    requirements = [Requirement(text) for text in [*project["dependencies"], *extras["dev"]]]
    ours = [requirement for requirement in requirements if requirement.name == project["name"]]
    named = [Requirement(text) for requirement in ours for extra in requirement.extras for text in extras[extra]]
    for requirement in [*(requirement for requirement in requirements if requirement not in ours), *named]:
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, str(requirement)


def test_light_modules_are_named_alike_everywhere(
    pyproject: dict[str, Any], contracts: dict[str, dict[str, Any]], light_modules: list[str]
) -> None:
    """One list serves the strict type check and both import contracts."""
    strict = [o["module"] for o in pyproject["tool"]["mypy"]["overrides"] if "engine.errors" in o["module"]]
    assert strict == [light_modules]
    allowed = [c["ignore_imports"] for c in contracts.values() if "ignore_imports" in c]
    assert [[rule.partition(" -> ")[2] for rule in rules] for rules in allowed] == [light_modules, light_modules]


def test_light_modules_load_neither_torch_nor_pandas(light_modules: list[str]) -> None:
    """Also when torch or pandas would come in through a third-party import, which the contracts do not see."""
    code = f"import {', '.join(light_modules)}, sys; print({{'torch', 'pandas', 'scipy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_modules_is_a_package(repo_root: Path, package: str) -> None:
    """A folder without `__init__.py` would be left out of the distribution and unseen by the import contracts."""
    folders = {path.parent for path in (repo_root / package).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_map_names_every_module(repo_root: Path) -> None:
    named = set(re.findall(r"`([a-z_/]+\.py)`", (repo_root / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    paths = [path for package in PACKAGES for path in (repo_root / package).rglob("*.py") if path.name != "__init__.py"]
    assert sorted({path.relative_to(repo_root).as_posix() for path in paths} - named) == []


def test_the_generated_pages_are_up_to_date(repo_root: Path) -> None:
    command = [sys.executable, "docs/generate.py", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(repo_root)}
    end = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True, check=False)
    assert end.returncode == 0, end.stderr
