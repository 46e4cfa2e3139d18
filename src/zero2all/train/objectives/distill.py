"""Distillation: a teacher whose likeliest tokens for each row are computed once and kept on disk, and the step: the
loss of the right tokens, and the distance to the teacher's probabilities."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.base.console import say
from zero2all.base.errors import UsageError
from zero2all.base.io import fingerprint, write_json
from zero2all.base.machine.devices import dtype_name
from zero2all.base.units import show_bytes
from zero2all.checkpoint import RankGroup
from zero2all.model import ModelInputs
from zero2all.model.ops.cross_entropy import SoftTargets
from zero2all.parallel import ParallelModel
from zero2all.parallel.mesh import shard_range
from zero2all.parallel.parallelize import free_gathered_weights, load_frozen_model
from zero2all.recipe import Recipe
from zero2all.recipe.objective import GRPORecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens.token_store import Array
from zero2all.train.data_loader import Batch
from zero2all.train.initial_weights import find_weights, open_weights
from zero2all.train.objectives.grpo_step import pack_rollouts, read_prompts, require_prompts
from zero2all.train.objectives.rollouts import (
    Rollout,
    RolloutRanks,
    sample_completions,
    sampling_params,
    total_rollouts,
)
from zero2all.train.objectives.step import SourceLosses, StepLoss, TokenObjective

BATCH_TOKENS = 8192  # of one forward pass of the teacher
CACHE = "teacher"
DTYPES: dict[str, np.dtype[Any]] = {
    ".ids": np.dtype(np.uint32),
    ".logps": np.dtype(np.float16),
    ".done": np.dtype(np.uint8),
}


@dataclass(frozen=True)
class TeacherIdentity:
    """The function that a teacher computes: different weights at the same path are a different teacher."""

    weights: str
    """Checksum."""
    config: dict[str, Any]
    """With the kernels: weights say nothing about RoPE, windows or scales."""
    dtype: str
    """Dtype of computation."""
    device: str
    """Its type: kernels, and so the last bits, are its own."""


class Teacher:
    """A frozen model, sharded like the student. On GPUs in bf16 where the student is."""

    def __init__(self, path: Path, student: ParallelModel, top_k: int, ranks: RankGroup) -> None:
        location = ranks.on_rank0(lambda: find_weights(path))  # a run that is being trained may write another meanwhile
        weights = open_weights(location)
        config, mesh = student.config, student.mesh
        if weights.config.vocab_size != config.vocab_size:
            raise UsageError(
                f"train.objective.distill.teacher: {location.path} has {weights.config.vocab_size} tokens, and the "
                f"model {config.vocab_size}: teacher and student need the same tokenizer"
            )
        self.top_k = top_k
        checksum = ranks.gather(
            lambda: weights.checksums(ranks.rank, ranks.world_size),
            lambda parts: fingerprint(functools.reduce(operator.or_, parts)),
        )
        self._device, dtype = mesh.device, teacher_dtype(student.dtype, mesh.device)
        self.model = load_frozen_model(weights, student.recipe, mesh, dtype)
        self.identity = TeacherIdentity(
            checksum, weights.config.model_dump(mode="json"), dtype_name(dtype), mesh.device.type
        )
        self._shards = mesh.get_mesh("dp_shard").get_group() if mesh.dims.dp_shard > 1 else None

    @torch.no_grad()
    def likeliest(self, tokens_BS: Tensor, doc_starts_BS: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities [B, S, K] of this rank's rows, if any.

        Every rank calls it: all of them gather the weights for a forward pass.
        """
        per_pass = max(1, BATCH_TOKENS // tokens_BS.shape[1])
        found = [torch.zeros(2, 0, tokens_BS.shape[1], self.top_k, device=self._device)]
        for first in range(0, per_pass * self._passes(-(-len(tokens_BS) // per_pass)), per_pass):
            rows = slice(first, first + per_pass)
            tokens, starts = tokens_BS[rows], None if doc_starts_BS is None else doc_starts_BS[rows]
            if not len(tokens):  # other ranks have more rows
                self.model(ModelInputs(torch.zeros(1, 1, dtype=torch.int64, device=self._device), likeliest=self.top_k))
                continue
            starts = None if starts is None else starts.to(self._device)
            found.append(self.model(ModelInputs(tokens.to(self._device), doc_starts_BS=starts, likeliest=self.top_k)))
        free_gathered_weights(self.model)
        ids, logps = torch.cat(found, dim=1)
        return ids.long(), logps

    def _passes(self, own: int) -> int:
        """The most that a rank needs which holds a shard of the same weights."""
        if self._shards is None:
            return own
        most = torch.tensor(own, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._shards)
        return int(most)


def teacher_dtype(student: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of weights and computation: bf16 takes half the memory of fp32, and is many times as fast on a GPU."""
    return torch.bfloat16 if device.type == "cuda" and student == torch.bfloat16 else torch.float32


@dataclass(frozen=True)
class TeacherCacheKey:
    """Everything that changes what the teacher expects of a row, or how it is stored."""

    teacher: TeacherIdentity
    samples: str
    """The fingerprint of the dataset: which tokens are in which row."""
    seq_len: int
    top_k: int
    masks_documents: bool
    """Whether the teacher sees the document of a token alone, from where the dataset lets it start."""
    end_of_text_first: bool
    version: int = 2
    """Counts changes of how rows are computed from the same inputs."""

    @property
    def name(self) -> str:
        return fingerprint(asdict(self))


class TeacherCache:
    """Rows of a stage on disk: token ids, log-probabilities in fp16, and which rows are there.

    Files are sparse, so that rows that no run reads take no space. Ranks write different rows.
    """

    def __init__(self, directory: Path, rows: dict[str, int], seq_len: int, top_k: int, ranks: RankGroup) -> None:
        self._names = sorted(rows)
        self._paths = {name: directory / f"{number}" for number, name in enumerate(self._names)}
        self._shapes = {name: (count, seq_len, top_k) for name, count in rows.items()}
        ranks.on_rank0(lambda: self._create(directory))

    def _create(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, path in self._paths.items():
            count, seq_len, top_k = self._shapes[name]
            for suffix, dtype in DTYPES.items():
                size = dtype.itemsize * (1 if suffix == ".done" else seq_len * top_k)
                with open(path.with_suffix(suffix), "ab") as file:
                    file.truncate(max(1, count * size))
        write_json(directory / "sources.json", self._names)
        size = sum(6 * int(np.prod(shape)) for shape in self._shapes.values())
        say(f"the teacher's likeliest tokens are kept in {directory}: up to {show_bytes(size)}")

    def read(self, located: Sequence[tuple[str, int]]) -> tuple[Array, Array, Array]:
        """Ids, log-probabilities, and which rows are there."""
        _, seq_len, top_k = next(iter(self._shapes.values()))
        shape = (len(located), seq_len, top_k)
        ids, logps = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        there = np.zeros(len(located), dtype=bool)
        for place, (name, row) in enumerate(located):
            there[place] = self._read(name, ".done", row)[0] == 1
            if there[place]:
                ids[place] = self._read(name, ".ids", row).reshape(shape[1:])
                logps[place] = self._read(name, ".logps", row).reshape(shape[1:])
        return ids, logps, there

    def write(self, located: Sequence[tuple[str, int]], ids: Array, logps: Array) -> None:
        for place, (name, row) in enumerate(located):
            self._write(name, ".ids", row, ids[place])
            self._write(name, ".logps", row, logps[place])
            self._write(name, ".done", row, np.ones(1))  # last, so that a killed process leaves no half row

    # Not mapped into memory: on a full disk a write to a sparse mapping ends the process with a bus error.

    def _read(self, name: str, suffix: str, row: int) -> Array:
        count = 1 if suffix == ".done" else int(np.prod(self._shapes[name][1:]))
        dtype = DTYPES[suffix]
        return np.fromfile(
            self._paths[name].with_suffix(suffix), dtype=dtype, count=count, offset=row * count * dtype.itemsize
        )

    def _write(self, name: str, suffix: str, row: int, values: Array) -> None:
        data = values.astype(DTYPES[suffix]).tobytes()
        with open(self._paths[name].with_suffix(suffix), "r+b") as file:
            file.seek(row * len(data))
            file.write(data)


class DistillObjective(TokenObjective):
    """See ``DistillRecipe``. Metrics are of the right tokens, so that runs with and without a teacher compare."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        source_losses: SourceLosses,
        model: ParallelModel,
        ranks: RankGroup,
        ping: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(source_losses)
        self._recipe, self._options, self._tokenizer = recipe, recipe.train.objective.distill, tokenizer
        self._ranks, self._ping, self._rollout_ranks = ranks, ping, RolloutRanks(model.mesh, ranks)
        assert self._options.teacher is not None
        self._teacher = Teacher(self._options.teacher, model, self._options.top_k, ranks)
        self._caches: dict[str, TeacherCache] = {}

    def begin(self, model: ParallelModel, batch: Batch) -> StepLoss:
        if self._options.on_policy:
            batch = self._sampled(model, batch)
            ids, logps = self._teacher.likeliest(batch.inputs, batch.doc_starts)
        else:
            ids, logps = self._cached(model, batch)
        soft = SoftTargets(ids, logps, self._options.weight)
        return StepLoss(max(1, batch.global_valid_tokens), batch=batch, soft=soft)

    def _cached(self, model: ParallelModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the teacher expects of this rank's rows: from disk, or computed now and kept."""
        dataset, mesh = batch.stage.dataset, model.mesh
        start, stop = batch.sample_range
        first, last = (start + row for row in shard_range(stop - start, mesh.dp_rank, mesh.dims.dp))
        located = dataset.locate(first, last)
        located += [located[0] if located else dataset.locate(start, start + 1)[0]] * (len(batch.inputs) - len(located))
        cache = self._cache(batch)
        ids, logps, there = cache.read(located)
        missing = np.flatnonzero(~there)
        chosen, starts = torch.from_numpy(missing), batch.doc_starts
        found = self._teacher.likeliest(batch.inputs[chosen], None if starts is None else starts[chosen])
        if len(missing):
            ids[missing], logps[missing] = (one.cpu().numpy() for one in found)
            real = [place for place in missing.tolist() if place < last - first]
            cache.write([located[place] for place in real], ids[real], logps[real])
            logps = logps.astype(np.float16).astype(np.float32)  # as they are read, so that a resumed run is the same
        return torch.from_numpy(ids), torch.from_numpy(logps)

    def _cache(self, batch: Batch) -> TeacherCache:
        name = batch.stage.name
        if name not in self._caches:
            dataset, top_k = batch.stage.dataset, self._options.top_k
            key = TeacherCacheKey(
                self._teacher.identity,
                dataset.fingerprint,
                dataset.seq_len,
                top_k,
                dataset.masks_documents,
                dataset.end_of_text_first,
            )
            self._caches[name] = TeacherCache(
                self._recipe.out / CACHE / key.name, dataset.sequences_per_source, dataset.seq_len, top_k, self._ranks
            )
        return self._caches[name]

    def _sampled(self, model: ParallelModel, batch: Batch) -> Batch:
        """One completion of the student to each prompt, in place of the completions of the data."""
        length = self._recipe.train.objective.max_answer_tokens
        prompts = read_prompts(batch, self._rollout_ranks, length, self._tokenizer)
        options = self._recipe.train.objective.model_copy(update={"grpo": GRPORecipe(mask_truncated=False)})
        seed = int(fingerprint([self._recipe.seed, batch.step])[:8], 16)
        groups = sample_completions(model, self._tokenizer, prompts, sampling_params(length, seed), 1, self._ping)
        rollouts = [[Rollout(prompt, one, 0.0) for one in group] for prompt, group in zip(prompts, groups, strict=True)]
        zeros = np.zeros((len(rollouts), 1), dtype=np.float32)
        seq_len = batch.inputs.shape[1]
        packed = pack_rollouts(rollouts, zeros, seq_len, options, self._tokenizer.eos_token_id)
        totals = self._rollout_ranks.sum(lambda: total_rollouts(rollouts, mask_truncated=False, rows=packed.count))
        require_prompts(totals, seq_len - length)
        sampled, _ = packed.to_batch(batch, totals.most_rows)
        return replace(
            sampled,
            sources=[name and batch.sources[0] for name in sampled.sources],
            global_valid_tokens=totals.counted_tokens,
        )
