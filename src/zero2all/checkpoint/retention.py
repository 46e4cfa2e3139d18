"""Retention: which checkpoints are removed after a new one was written."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.base.errors import Z2aError
from zero2all.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointHeader,
    by_bits_per_byte,
    is_on_lineage,
)
from zero2all.checkpoint.integrity import VALID, IntegrityResult, verify_checksums, verify_sizes, worst_result
from zero2all.checkpoint.rank_group import RankGroup


@dataclass(frozen=True)
class Retention:
    """Keeps the newest valid checkpoints, the best by validation bits per byte, and the permanent ones.

    A damaged checkpoint, or one of an abandoned history, does not count: it is removed by age, or at once if it is
    damaged and of a later step, which the run will write again. An unreadable one is never removed for that.
    """

    checkpoints: CheckpointDirectory
    keep: int
    keep_best: int
    rank_group: RankGroup

    def apply(self, newest: int) -> None:
        """Remove what is not kept. Called on all ranks after the checkpoint of step ``newest`` was written."""
        steps: list[int] = self.rank_group.on_rank0(self.checkpoints.steps)
        to_remove = [step for step in steps if step > newest and self._verify_once(step).kind == "damaged"]
        earlier = [step for step in steps if step <= newest]
        headers = self.rank_group.on_rank0(lambda: {step: self._read_header(step) for step in earlier})
        lineage = headers[newest].lineage if newest in headers else None
        restorable = [step for step in reversed(earlier) if is_on_lineage(step, headers[step], lineage)]
        kept = self._first_valid(restorable, self.keep)
        if len(kept) == self.keep:
            old = [step for step in earlier if step < min(kept) and not headers[step].permanent]
            best = self._first_valid(by_bits_per_byte(headers), self.keep_best)
            to_remove += [step for step in old if step not in best]
        self.rank_group.on_rank0(lambda: self._remove_all(to_remove))

    def _remove_all(self, steps: list[int]) -> None:
        for step in steps:
            self.checkpoints.remove(step)

    def _first_valid(self, steps: list[int], count: int) -> set[int]:
        valid: set[int] = set()
        for step in steps:
            if len(valid) == count:
                break
            if self._verify_once(step).kind == "valid":
                valid.add(step)
        return valid

    def _verify_once(self, step: int) -> IntegrityResult:
        """All ranks together hash the files of a checkpoint once; later rank 0 checks sizes only."""
        path, verified = self.checkpoints.path(step), self.checkpoints.verified_steps
        result = self.rank_group.on_rank0(lambda: verify_sizes(path, step) if step in verified else None)
        if result is None:
            rank_slice = (self.rank_group.rank, self.rank_group.world_size)
            result = self.rank_group.gather(lambda: verify_checksums(path, step, rank_slice), worst_result)
            if result == VALID:
                verified.add(step)
        return result

    def _read_header(self, step: int) -> CheckpointHeader:
        try:
            return self.checkpoints.read_header(step)
        except (FileNotFoundError, NotADirectoryError):
            return CheckpointHeader()
        except (OSError, Z2aError) as error:
            # A damaged state says nothing; an unreadable one may be permanent.
            return CheckpointHeader(permanent=not isinstance(error.__cause__, ValueError))
