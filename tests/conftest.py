"""What every test may use: shared reference data where it lies beside the checkout, and skips for absent hardware."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No example has a time limit: machines that run tests may be busy.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# One thread per process, here and in every child: tests of several ranks share few cores, and sums keep their order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that the tests belong to."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of reference data (published configs, runs, curves) laid beside the checkout; not part of it."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the reference data folder ../shared/data is not beside this checkout")
    return path


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where no CUDA device is visible."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; none is visible")
