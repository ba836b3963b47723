"""What torch does not promise to keep is still there."""

from __future__ import annotations

import pytest

from engine import torch_private

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", torch_private.__all__)
def test_private_symbol_exists(name: str) -> None:
    assert callable(getattr(torch_private, name))
