"""The weights of a durable checkpoint, without the state of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from zero2all.checkpoint.checkpoint_store import STATE_FILE, CheckpointStore, checkpoint_step
from zero2all.checkpoint.integrity import IntegrityResult, read_checksums, verify_sizes
from zero2all.errors import UsageError, Z2aError
from zero2all.recipe import ModelConfig
from zero2all.records import first_problem

PREFIX = "model."


class CheckpointWeights:
    """The weights of a checkpoint of a run, on disk or in an object store.

    >>> weights = CheckpointWeights(Path("runs/first/run/checkpoints/step-00000400"))
    """

    def __init__(self, path: Path) -> None:
        step = checkpoint_step(path.name)
        if step is None:
            raise UsageError(f"{path} is not a checkpoint: its name is not such as step-00000400")
        self.path, self.step, store = path, step, CheckpointStore(path.parent)
        self._raise_if_damaged(verify_sizes(path, step))
        state = store.read_state(step)
        self.tokenizer_fingerprint = state.tokenizer
        try:
            self.config = ModelConfig.model_validate({**state.model, **asdict(state.rope)})
        except ValidationError as error:
            raise self._damaged(f"{STATE_FILE}: {first_problem(error)}") from error
        self._reader = store.reader(step)
        self._entries = {
            name.removeprefix(PREFIX): entry
            for name, entry in self._reader.entries().items()
            if name.startswith(PREFIX)
        }
        dtypes = {str(entry.properties.dtype).removeprefix("torch.") for entry in self._entries.values()}
        self.dtype = ", ".join(sorted(dtypes))

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._entries[name].size) if name in self._entries else None

    def read(self, name: str, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        return self._reader.read_part(f"{PREFIX}{name}", begin, size)

    def checksums(self, rank: int, world_size: int) -> dict[str, str]:
        self._raise_if_damaged(CheckpointStore(self.path.parent).verify(self.step, (rank, world_size)))
        return read_checksums(self.path, self.step, (rank, world_size))

    def _raise_if_damaged(self, result: IntegrityResult) -> None:
        if result.kind != "valid":
            raise self._damaged(result.reason)

    def _damaged(self, reason: str) -> Z2aError:
        return Z2aError(f"{self.path} cannot be used: {reason}; give another checkpoint of the run")
