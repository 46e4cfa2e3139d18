"""Follows the memory of tensors while a step runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from zero2all.base.torch_private import TorchDispatchMode
from zero2all.model.ops.chunked_loss import chunked_forward_backward
from zero2all.parallel.sharded_init import to_local


@dataclass(eq=False)
class Allocation:
    """A storage while it lives; 0 bytes while FSDP has freed it."""

    storage: weakref.ref[torch.UntypedStorage]
    size: int
    label: str | None
    """What ran when it was allocated; None for what was there before."""


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``changed`` with each allocation, resize and free of a storage on one device while it is active.

    It does not see inside of compiled code.
    """

    KINDS: tuple[type, ...] = (Tensor, nn.Parameter)
    """Types of tensors that have memory of their own. What any other subclass wraps is an output of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.live: dict[int, Allocation] = {}
        self._resize = torch.UntypedStorage.resize_

    def label(self) -> str | None:
        """What runs now."""
        raise NotImplementedError

    def changed(self, allocation: Allocation, growth: int) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        tracker, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker._resized(storage)
            return result

        setattr(torch.UntypedStorage, "resize_", resized)  # noqa: B010 - how FSDP frees gathered weights
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.zero2all.chunked_loss.default:
            return self._chunked_loss(*args)
        result = op(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.track(value, self.label())
        return result

    def _chunked_loss(self, x: Tensor, *options: Any) -> Any:
        """The operation, with what it allocates inside."""
        weight, targets, vocab, softcap, z_loss, with_gradient = options
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            scale = torch.ones(len(x), device=x.device) if with_gradient else None
            return chunked_forward_backward(x, weight, targets, vocab, softcap, z_loss, scale)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

    def track(self, tensor: Tensor, label: str | None) -> None:
        tensor = to_local(tensor)
        if type(tensor) not in self.KINDS or tensor.device != self._device:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.live:
            reference = weakref.ref(storage, lambda _: self._freed(key))
            self.live[key] = Allocation(reference, storage.nbytes(), label)
            self.changed(self.live[key], storage.nbytes())

    def allocations(self, tensors: Iterable[Tensor]) -> list[Allocation]:
        """The tracked storages of some tensors, each once."""
        keys = dict.fromkeys(id(to_local(tensor).untyped_storage()) for tensor in tensors)
        return [self.live[key] for key in keys if key in self.live]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        allocation = self.live.get(id(storage))
        if allocation is not None:
            before, allocation.size = allocation.size, storage.nbytes()
            self.changed(allocation, allocation.size - before)

    def _freed(self, key: int) -> None:
        allocation = self.live.pop(key)
        self.changed(allocation, -allocation.size)
