"""Where a run's checkpoints are, for who must not import PyTorch to know it."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS_FOLDER = "checkpoints"
"""In the run folder: ``checkpoints/step-00000100``."""
MANIFEST_FILE = "manifest.json"
"""Of each checkpoint, written last and removed first: a folder without it is no checkpoint."""


def checkpoint_folders(run_folder: Path) -> list[Path]:
    """The folders of a run's checkpoints, oldest step first, without half-written ones."""
    return sorted(path.parent for path in (run_folder / CHECKPOINTS_FOLDER).glob(f"step-*/{MANIFEST_FILE}"))
