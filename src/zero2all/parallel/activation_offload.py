"""Activation offload: what the backward pass needs of a block waits in main memory instead of GPU memory.

torch's ``save_on_cpu`` copies on the stream that computes, so that every block waits for its copies. Here a side stream
copies while the next block is computed, and in the backward pass fetches one block ahead.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from zero2all.base.errors import UsageError
from zero2all.parallel.sharded_init import to_local

MIN_BYTES = 2**20  # of a tensor that is offloaded: a copy of less costs more than it frees
# Through which a saved tensor is still a weight: the copies that autocast makes, and views.
WEIGHT_NODES = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0")


class Copies(Protocol):
    """How bytes get to main memory and back."""

    def to_host(self, data: Tensor) -> Tensor:
        """Begin to copy. ``data`` must stay until ``wait`` for a later ``mark``."""
        ...

    def mark(self) -> Any:
        """For ``wait``: the copies that have begun."""
        ...

    def to_device(self, host: Iterable[Tensor]) -> tuple[list[Tensor], Any]:
        """Begin to copy, and what ``wait`` needs."""
        ...

    def wait(self, mark: Any) -> None:
        """Before copies are read, or what they were copied from is freed."""
        ...


class StreamCopies:
    """On a GPU: by a side stream, to and from pinned memory. The host waits for nothing.

    All memory belongs to the stream that computes, which waits for the copies before it frees or reads anything. So
    the side stream is never more than a block behind or ahead of it in time, whatever the host has queued.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def to_host(self, data: Tensor) -> Tensor:
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(data, non_blocking=True)
        return host

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self.stream.record_event()
        return event

    def to_device(self, host: Iterable[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        hosts = list(host)
        data = [torch.empty_like(one, device=self.device) for one in hosts]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still use that memory
        with torch.cuda.stream(self.stream):  # after the copies to the host, which are on the same stream
            for one, source in zip(data, hosts, strict=True):
                one.copy_(source, non_blocking=True)
        return data, self.mark()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)


class BlockingCopies:
    """On a CPU, whose activations are in main memory anyway: for tests."""

    def to_host(self, data: Tensor) -> Tensor:
        return data.clone()

    def to_device(self, host: Iterable[Tensor]) -> tuple[list[Tensor], None]:
        return [one.clone() for one in host], None

    def mark(self) -> None: ...

    def wait(self, mark: None) -> None: ...


def copies_for(device: torch.device) -> Copies:
    if device.type not in ("cuda", "cpu"):
        raise UsageError(f"parallel.activation_offload needs a CUDA GPU, and the device is {device.type}: remove it")
    return StreamCopies(device) if device.type == "cuda" else BlockingCopies()


class _Storage:
    """The bytes of one storage, which several saved tensors may be views of."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.data: Tensor | None = None  # on the device, once fetched


class _SavedView(NamedTuple):
    """A saved tensor without its bytes."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    sharding: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None
    """The sharding of a DTensor."""

    @classmethod
    def of(cls, tensor: Tensor, local: Tensor, storage: _Storage) -> _SavedView:
        sharding = None
        if isinstance(tensor, DTensor):
            sharding = (tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
        return cls(storage, local.dtype, int(local.storage_offset()), local.shape, local.stride(), sharding)

    def restore(self) -> Tensor:
        data = self.storage.data
        assert data is not None, "its block was not fetched"
        local = torch.empty(0, dtype=self.dtype, device=data.device)
        local.set_(data.untyped_storage(), self.offset, self.shape, self.stride)
        if self.sharding is None:
            return local
        mesh, placements, shape, stride = self.sharding
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class _BlockPass:
    """One forward pass of one block, with what is offloaded of it until its backward pass."""

    def __init__(self, copies: Copies, kept: set[int], frozen: set[torch.Size], before: _BlockPass | None) -> None:
        """``kept`` are addresses, ``frozen`` the shapes of weights without a gradient."""
        self.copies, self.kept, self.frozen, self.before = copies, kept, frozen, before
        self._offloaded: dict[int, tuple[Tensor, _Storage]] = {}  # by address, while the tensors cannot be freed
        # Saved tensors hold their storage, so that it is freed as soon as the last of them has been used.
        self._storages: list[weakref.ref[_Storage]] = []
        self._is_fetched = self._is_ready = False

    def pack(self, tensor: Tensor) -> Tensor | _SavedView:
        local = to_local(tensor)
        address, size = local.untyped_storage().data_ptr(), local.untyped_storage().nbytes()
        if size < MIN_BYTES or address in self.kept or _is_weight(tensor.grad_fn) or self._is_frozen(tensor):
            return tensor.detach()  # the tensor itself may be the output of its node: a cycle
        if address not in self._offloaded:
            data = torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
            storage = _Storage(self.copies.to_host(data))
            self._offloaded[address] = local.detach(), storage
            self._storages.append(weakref.ref(storage))
        return _SavedView.of(tensor, local, self._offloaded[address][1])

    def _is_frozen(self, tensor: Tensor) -> bool:
        """Whether it may be autocast's copy of a frozen weight, which nothing links to it."""
        return tensor.grad_fn is None and not tensor.requires_grad and tensor.shape in self.frozen

    def end_forward(self) -> None:
        self._copied = self.copies.mark()

    def release(self) -> None:
        """Let go of the tensors on the device, once they have been copied."""
        self.copies.wait(self._copied)
        self._offloaded.clear()

    def unpack(self, packed: Tensor | _SavedView) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.fetch()
        if not self._is_ready:
            self._is_ready = True
            self.copies.wait(self._fetched)
            if self.before is not None:  # while this block is computed
                self.before.fetch()
                self.before = None
        return packed.restore()

    def fetch(self) -> None:
        if self._is_fetched:
            return
        self._is_fetched = True
        if self._offloaded:
            self.release()
        storages = list(self._alive())
        fetched, self._fetched = self.copies.to_device(one.host for one in storages)
        for storage, data in zip(storages, fetched, strict=True):
            storage.data = data

    def _alive(self) -> Iterator[_Storage]:
        return (storage for one in self._storages if (storage := one()) is not None)


class ActivationOffload:
    """Offloads what blocks save for the backward pass; with full checkpointing that is the input of each."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._last: _BlockPass | None = None
        self._copying: _BlockPass | None = None  # whose tensors are on the device until the next block is done

    def wrap(self, block: nn.Module, *, is_first: bool) -> None:
        """The forward of a block, not the block: parameter names stay."""
        block.forward = functools.partial(self._run, block, block.forward, is_first)

    def wrap_last(self, block: nn.Module) -> None:
        """A block whose own tensors stay on the device."""
        block.forward = functools.partial(self._run_last, block.forward)

    def _run_last(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        self._release(None)
        return out

    def _release(self, following: _BlockPass | None) -> None:
        if self._copying is not None:
            self._copying.release()
        self._copying = following

    def _run(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        is_first: bool,
        stream: Tensor,
        *shared: Any,
        **options: Any,
    ) -> Any:
        """``shared`` is what all blocks read: it stays where it is."""
        if not torch.is_grad_enabled():
            return forward(stream, *shared, **options)
        kept = {to_local(one).untyped_storage().data_ptr() for one in (*block.parameters(), *_tensors(shared))}
        frozen = {
            size
            for weight in block.parameters()
            if weight.dim() == 2 and not weight.requires_grad
            for size in (weight.shape, weight.shape[::-1])
        }
        block_pass = _BlockPass(self.copies, kept, frozen, None if is_first else self._last)
        self._last = block_pass
        with saved_tensors_hooks(block_pass.pack, block_pass.unpack):
            out = forward(stream, *shared, **options)
        block_pass.end_forward()
        self._release(block_pass)
        return out


def _is_weight(node: Node | None) -> bool:
    """Whether a tensor with this ``grad_fn`` is a parameter, or only a copy or a view of one."""
    while node is not None and node.name() in WEIGHT_NODES:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from _tensors(value)
