"""Copies between host and device that none of them waits for: batches to the device, metrics from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.elastic.heartbeat import DEVICE_WATCH
from zero2all.hardware import copy_to_device
from zero2all.model.ops.varlen import document_cu_seqlens


@dataclass(frozen=True)
class DeviceBatch:
    """What the model gets of a batch."""

    inputs: Tensor
    targets: Tensor
    doc_starts: Tensor | None
    """``document_starts``, if attention stays inside documents."""
    cu_seqlens_MN: Tensor | None
    """``document_cu_seqlens`` of its micro-batches, where a kernel needs them."""
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """To be called before use. The device waits for the copy, the host does not."""
        if self.copied is None:
            return
        stream = torch.cuda.current_stream(self.inputs.device)
        stream.wait_event(self.copied)
        for tensor in (self.inputs, self.targets, self.doc_starts, self.cu_seqlens_MN):
            if tensor is not None:
                tensor.record_stream(stream)  # its memory is not reused before this stream has read it


class BatchCopier:
    """Copies a batch to a device, on a CUDA stream of its own.

    >>> copier = BatchCopier(device, model.micro_batch_rows)
    >>> copier.copy(inputs, targets, doc_starts=None, micro_batch_size=4)  # in the thread of the loader
    """

    def __init__(self, device: torch.device, micro_batch_rows: Callable[[int, int | None], int]) -> None:
        self._device, self._micro_batch_rows = device, micro_batch_rows
        self._stream: torch.cuda.Stream | None = None

    def copy(
        self, inputs: Tensor, targets: Tensor, doc_starts: Tensor | None, micro_batch_size: int | None
    ) -> DeviceBatch:
        """On a CPU nothing is copied."""
        starts, device = doc_starts, self._device
        if device.type != "cuda":
            return DeviceBatch(
                inputs.to(device), targets.to(device), None if starts is None else starts.to(device), None
            )
        cu_seqlens_MN = None
        if starts is not None:
            cu_seqlens_MN = document_cu_seqlens(starts, self._micro_batch_rows(len(inputs), micro_batch_size))
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            return DeviceBatch(
                copy_to_device(inputs, device),
                copy_to_device(targets, device),
                None if starts is None else copy_to_device(starts, device),
                None if cu_seqlens_MN is None else copy_to_device(cu_seqlens_MN, device),
                self._stream.record_event(),
            )


class HostCopy:
    """A matrix and a vector of the device on their way to the host, as one copy. Only ``tolist`` waits for it."""

    def __init__(self, matrix: Tensor, vector: Tensor) -> None:
        self._columns, self._cells = matrix.shape[1], matrix.numel()
        tensor = torch.cat([matrix.flatten(), vector.to(matrix)])
        self._tensor, self._copied = tensor, None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def tolist(self) -> tuple[list[list[float]], list[float]]:
        if self._copied is not None:
            with DEVICE_WATCH.host_waits():
                self._copied.synchronize()
        values: list[float] = self._tensor.tolist()
        rows = [values[first : first + self._columns] for first in range(0, self._cells, self._columns)]
        return rows, values[self._cells :]
