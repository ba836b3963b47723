"""Checkpoints of a run on disk.

A checkpoint is a folder that counts only when its manifest, written last, is there and every file it lists has the size
it says: a half-written one is as good as none. Tensors go through PyTorch's distributed checkpoint (DCP), so that they
can be loaded under another plan or number of ranks.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from engine.atomic import make_folder, sync_folder, write_json
from engine.checkpoint_folders import CHECKPOINTS_FOLDER, MANIFEST_FILE
from engine.config import RunConfig
from engine.context import ParallelContext
from engine.errors import UserError
from engine.loss_guard import LossHistory
from engine.measure import Measured
from engine.plan import Plan
from engine.schema import Schema
from engine.spec import Hyperparameters, ModelSpec

_LATER = ("previous_load", "load_forecast", "load_forecast.num_steps")
"""Ends of names of tensors that older checkpoints lack: loads of experts, which are zero before the first step."""


class Manifest(Schema):
    """Where a run stood when the checkpoint was written, and how to go on from it."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens trained on: the position in the schedule."""
    position: int
    """Global samples consumed (those left out included): the position in the data."""
    learning_rate_scale: float
    """Factor on the schedule in force."""
    micro_batch_size: int
    """Micro-batch in force."""
    num_skipped_steps: int = 0
    """Steps so far whose update was left out."""
    random_uses: dict[str, int] = Field(default_factory=dict)
    """How often each named random stream was used: the whole state of the random numbers."""
    losses: LossHistory = LossHistory()
    """What the loss guard knows."""
    measured: Measured = Measured()
    """What was measured up to here."""
    handled: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Ids of the newest change requests that were answered."""
    identity: dict[str, Any]
    """What a run that goes on from here must have in common with this one."""
    plan: Plan
    """The plan in force, as in the run file: ``micro_batch_size`` belongs to it."""
    world_size: int
    """Ranks of that plan."""
    requested: bool = False
    """Whether somebody asked for it to be kept; the newest such one is, beside the newest of all."""
    time: float = Field(default_factory=time.time)
    """Unix time."""
    file_bytes: dict[str, int] = Field(default_factory=dict)
    """Size of each file."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    """Its folder."""
    manifest: Manifest


def identity_of(config: RunConfig, corpus_hash: str) -> dict[str, Any]:
    """What makes two runs one: everything that changes the result, and nothing else (so no plan, folder or name)."""
    return {
        "model": _architecture(config.model),
        "hyperparameters": config.hyperparameters.to_data(),
        "sequence_length": config.workload.sequence_length,
        "total_tokens": config.workload.total_tokens,
        "seed": config.runtime.seed,
        "corpus": corpus_hash,
    }


def _architecture(model: ModelSpec) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude={"schema_version", "name", "family"})


def _completed(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity as it would be written now: fields that came later have their defaults, which do what was done
    without them."""
    try:
        model, hyper = ModelSpec(**identity["model"]), Hyperparameters(**identity["hyperparameters"])
    except (KeyError, TypeError, ValidationError):
        return identity
    return identity | {"model": _architecture(model), "hyperparameters": hyper.to_data()}


def check_identity(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Refuse to continue one run from another's checkpoint.

    Raises:
        UserError: With every value that differs.
    """
    found = differences(_completed(checkpoint.manifest.identity), identity)
    if found:
        raise UserError(
            f"{checkpoint.path} belongs to another run: {'; '.join(found)}",
            hint="train in a new folder, or set the values back to the checkpoint's;"
            " runtime.init_from starts a new run from exported weights",
        )


def differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> list[str]:
    """Every value that differs, as words; nested settings by dotted name."""
    lines: list[str] = []
    for key in sorted(theirs.keys() | ours.keys()):
        a, b = theirs.get(key), ours.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key} is {a!r} there and {b!r} here")
    return lines


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint by its folder.

    Raises:
        UserError: There is no whole checkpoint in the folder.
    """
    checkpoint = _read(Path(path))
    if checkpoint is None:
        raise UserError(f"{path} is not a whole checkpoint", hint=f"name a folder that holds a {MANIFEST_FILE}")
    return checkpoint


def load_tensors(checkpoint: Checkpoint, state: dict[str, Any], context: ParallelContext) -> None:
    """Fill the tensors of ``state`` in place with this rank's part of the checkpoint's. Called on all ranks.

    Args:
        checkpoint: The checkpoint.
        state: Tensors by section and name.
        context: The ranks that load together.

    Raises:
        UserError: On all ranks, when the checkpoint lacks tensors that it had from the beginning of this format.
    """
    reader = FileSystemReader(checkpoint.path)
    lacking = context.together(lambda: _lacking(reader, checkpoint.path, state))
    for section, name in lacking:
        state[section][name].zero_()
    there = {
        section: {name: tensor for name, tensor in tensors.items() if (section, name) not in lacking}
        for section, tensors in state.items()
    }
    with _quiet_alone():
        load(there, storage_reader=reader, no_dist=context.world_size == 1)


def _lacking(reader: FileSystemReader, path: Path, state: dict[str, Any]) -> set[tuple[str, str]]:
    """Sections and names of tensors that a checkpoint lacks because it was written before there were any."""
    held = reader.read_metadata().state_dict_metadata
    lacking = {(section, name) for section in state for name in state[section] if f"{section}.{name}" not in held}
    strange = sorted(name for _, name in lacking if not name.endswith(_LATER))
    if strange:
        raise UserError(
            f"{path} lacks {len(strange)} tensors of this model, the first is {strange[0]}",
            hint="go on with the version that wrote it, or train in a new folder",
        )
    return lacking


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Without the warning that one process saves or loads alone: that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _read(path: Path) -> Checkpoint | None:
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        if any((path / name).stat().st_size != size for name, size in manifest.file_bytes.items()):
            return None
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    return Checkpoint(path, manifest)


def _file_bytes(path: Path) -> dict[str, int]:
    """Sizes of the tensor files just written to an empty folder."""
    return {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: The run folder.
        keep: How many of the newest are kept.
        context: The ranks that save together.
    """

    def __init__(self, folder: Path, keep: int, context: ParallelContext) -> None:
        self._folder = folder / CHECKPOINTS_FOLDER
        self._keep = keep
        self._context = context

    def list(self) -> list[Checkpoint]:
        """All whole checkpoints, oldest step first."""
        found = (_read(path) for path in self._folder.glob("step-*"))
        return sorted((one for one in found if one is not None), key=lambda one: one.manifest.step)

    def newest(self) -> Checkpoint | None:
        """The whole checkpoint of the highest step; the same on all ranks."""
        found = self.list() if self._context.is_main else []
        path = self._context.broadcast(str(found[-1].path) if found else None)
        return open_checkpoint(path) if path else None

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint is one of this store's."""
        return checkpoint.path.resolve().parent == self._folder.resolve()

    def save(self, manifest: Manifest, tensors: Callable[[], dict[str, Any]]) -> Path:
        """Write a checkpoint; called on all ranks with manifests that differ in times alone: rank 0's is written.

        One of the same step and data position holds the same tensors, since training is deterministic: then only its
        manifest is written anew. ``tensors`` gives this rank's part of everything else.
        """
        path = self._folder / f"step-{manifest.step:08d}"
        present = self._context.on_main(lambda: self._amend_same(path, manifest))
        if not present:
            self._context.on_main(lambda: _make_empty(path))
            with _quiet_alone():
                writer = FileSystemWriter(path)
                save(tensors(), storage_writer=writer, no_dist=self._context.world_size == 1)
            self._context.on_main(lambda: _write_manifest(path, manifest.changed(file_bytes=_file_bytes(path))))
        self._context.on_main(self._prune)
        return path

    def amend(self, checkpoint: Checkpoint, **changes: Any) -> None:
        """Change how to go on from a checkpoint (not its tensors); called on all ranks."""
        self._context.on_main(lambda: _write_manifest(checkpoint.path, checkpoint.manifest.changed(**changes)))

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: their line of history was given up. Called on all ranks."""

        def discard() -> None:
            for one in self.list():
                if one.manifest.step > step:
                    _remove(one.path)

        self._context.on_main(discard)

    def _amend_same(self, path: Path, manifest: Manifest) -> bool:
        there = _read(path)
        if there is None or (there.manifest.step, there.manifest.position) != (manifest.step, manifest.position):
            return False
        written = {name: getattr(there.manifest, name) for name in ("file_bytes", "time")}
        requested = manifest.requested or there.manifest.requested
        _write_manifest(path, manifest.changed(**written, requested=requested))
        return True

    def _prune(self) -> None:
        whole = self.list()
        kept = {one.path for one in whole[-self._keep :]}
        kept |= {one.path for one in [one for one in whole if one.manifest.requested][-1:]}
        for path in self._folder.glob("step-*"):
            if path not in kept:
                _remove(path)


def _make_empty(path: Path) -> None:
    _remove(path)
    make_folder(path)


def _write_manifest(path: Path, manifest: Manifest) -> None:
    write_json(path / MANIFEST_FILE, manifest.to_data())
    sync_folder(path.parent)


def _remove(path: Path) -> None:
    """Remove a checkpoint, the manifest first: what is left half-way is not a checkpoint any more."""
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
