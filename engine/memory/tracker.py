"""Peak bytes of live tensor storages, for devices without a counter of their own.

Torch counts no memory on a CPU. The tracker watches every operation and keeps a weak reference to each storage it
meets: a storage lives as long as a tensor, a view or autograd's saved tensors need it, so the sum over the living is
what training needs. Scratch memory within one kernel has no storage and is not seen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch

from engine.torch_private import TorchDispatchMode


class LiveStorageTracker(TorchDispatchMode):
    """Counts the bytes of living storages while it is entered.

    Every storage is counted once, however many tensors share it, from the first operation that reads or makes it until
    it is freed. Storages that live before entry and are not used until later are told by ``track``. Wrapper tensors
    (DTensor and such) are seen through: the operations on their parts are what counts. Meta tensors have no bytes.

    After exit ``peak_bytes`` stays and nothing else is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        """The largest ``live_bytes`` so far."""
        self.live_bytes = 0
        """Bytes of the storages that live now."""
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        # The autograd engine works in threads of its own. Reentrant, because a storage may be freed in the middle.
        self._lock = threading.RLock()
        self._plain_resize: Callable[..., Any] | None = None

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of ``tensors`` from now on: parameters, gradients, optimizer states, batches."""
        for tensor in tensors:
            self._count(tensor)

    def __enter__(self) -> Self:
        # A storage that is resized in place is no operation, and how sharded parameters come and go.
        plain = self._plain_resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            with self._lock:
                if id(storage) in self._storages:
                    self._update(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._plain_resize  # type: ignore[method-assign,assignment]
        self._storages.clear()
        self.live_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper takes itself apart and comes back with its parts
        self.track(_tensors((args, kwargs)))
        result = function(*args, **(kwargs or {}))
        self.track(_tensors(result))
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__"):
            self.track(_tensors([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]))
        elif tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if self._counts(tensor, storage):
                self._update(storage)

    def _counts(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether the storage has bytes."""
        return storage.device.type != "meta"  # of meta and fake tensors

    def _update(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage``, or what its size changed by."""
        key, size = id(storage), storage.nbytes()  # torch keeps the Python object as long as the storage lives
        with self._lock:
            reference, counted = self._storages.get(key) or (weakref.ref(storage, lambda _: self._freed(key)), 0)
            if size != counted or key not in self._storages:
                self._storages[key] = (reference, size)
                self.live_bytes += size - counted
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int) -> None:
        with self._lock:
            _, counted = self._storages.pop(key, (None, 0))
            self.live_bytes -= counted


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
