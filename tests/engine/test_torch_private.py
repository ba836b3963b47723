"""What torch does not promise to keep is still there."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

from engine import torch_private

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("place", torch_private.PRIVATE)
def test_private_symbol_exists(place: str) -> None:
    module, _, name = place.partition(":")
    reduce(getattr, name.split("."), import_module(module))


def test_private_modules_are_imported_in_one_place() -> None:
    private = re.compile(r"(from|import) torch[\w.]*(\._|.* import .*\b_[a-z])")
    for path in Path(torch_private.__file__).parent.rglob("*.py"):
        found = [line for line in path.read_text().splitlines() if private.search(line)]
        if path.name != "torch_private.py":
            assert not found, path
            continue
        for line in found:
            module = line.split()[1]
            assert any(place.startswith(f"{module}:") for place in torch_private.PRIVATE), line
