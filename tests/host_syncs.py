"""Count what would make the host wait for a GPU, on a machine without one.

Two kinds: reading a tensor from Python (``item``, ``tolist``, ``bool``), and operations whose output shape depends on
the data. What happens inside a kernel of the CPU does not count: a GPU has other kernels.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zero2all

PACKAGE = str(Path(zero2all.__file__).parent)
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
DATA_DEPENDENT = ("nonzero", "bincount", "masked_select", "unique", "_unique2", "unique_dim", "equal", "is_nonzero")


class HostSyncs(TorchDispatchMode):
    """
    >>> with HostSyncs() as found:
    ...     step()
    >>> found.places
    ['tolist in train_step']
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._in_kernel = 0
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> HostSyncs:
        for name in READS:
            self._patch.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patch.undo()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name().partition("::")[2].partition(".")[0]
        if not self._in_kernel:
            if name in DATA_DEPENDENT:
                self._note(name)
            elif name == "repeat_interleave" and "output_size" not in (kwargs or {}):
                self._note("repeat_interleave without output_size")
            elif name in ("index", "index_put_") and any(
                index is not None and index.dtype == torch.bool for index in args[1]
            ):
                self._note(f"{name} with a mask")
        own = op.namespace == "zero2all"
        self._in_kernel += own
        try:
            return op(*args, **(kwargs or {}))
        finally:
            self._in_kernel -= own

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._in_kernel and tensor.device.type != "meta":
                self._note(name)
                self._in_kernel += 1  # tolist may call item
                try:
                    return original(tensor, *args, **kwargs)
                finally:
                    self._in_kernel -= 1
            return original(tensor, *args, **kwargs)

        return read

    def _note(self, name: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}" if frames else "elsewhere"
        self.places.append(f"{name} in {place}")
