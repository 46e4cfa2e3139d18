"""The step of distillation: the loss of the right tokens, and the distance to a teacher's probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from zero2all.checkpoint import RankGroup
from zero2all.io import fingerprint
from zero2all.model.ops.soft_loss import SoftTargets
from zero2all.parallel import ParallelModel
from zero2all.parallel.mesh import shard_range
from zero2all.recipe import Recipe
from zero2all.recipe.objective import GRPORecipe
from zero2all.tokenizer import Tokenizer
from zero2all.train.data_loader import Batch
from zero2all.train.grpo_objective import pack_rollouts, read_prompts, require_prompts
from zero2all.train.rollouts import Rollout, RolloutRanks, sample_answers, sampling_params, total_rollouts
from zero2all.train.step_objective import SourceLosses, StepLoss, TokenObjective
from zero2all.train.teacher import CACHE, Teacher, TeacherCache, TeacherCacheKey


class DistillObjective(TokenObjective):
    """See ``DistillRecipe``. Metrics are those of the right tokens, so that runs with and without a teacher compare."""

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
            rows = self._teacher.likeliest(batch.inputs, batch.doc_starts)
            ids, logps = rows.ids_BSK, rows.logps_BSK
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
        rows = self._teacher.likeliest(batch.inputs[chosen], None if starts is None else starts[chosen])
        if len(missing):
            ids[missing] = rows.ids_BSK.cpu().numpy()
            logps[missing] = rows.logps_BSK.cpu().numpy()
            real = [place for place in missing.tolist() if place < last - first]
            cache.write([located[place] for place in real], ids[real], logps[real])
            logps = logps.astype(np.float16).astype(np.float32)  # as they are read, so that a resumed run is the same
        return torch.from_numpy(ids), torch.from_numpy(logps)

    def _cache(self, batch: Batch) -> TeacherCache:
        name = batch.stage.name
        if name not in self._caches:
            dataset, top_k = batch.stage.dataset, self._options.top_k
            key = TeacherCacheKey(
                self._teacher.identity, dataset.fingerprint, dataset.seq_len, top_k, dataset.masks_documents,
                dataset.end_of_text_first,
            )  # fmt: skip
            self._caches[name] = TeacherCache(
                self._recipe.out / CACHE / key.name, dataset.sequences_per_source, dataset.seq_len, top_k, self._ranks
            )
        return self._caches[name]

    def _sampled(self, model: ParallelModel, batch: Batch) -> Batch:
        """One answer of the student to each prompt, in place of the answers of the data."""
        length = self._recipe.train.objective.max_answer_tokens
        prompts = read_prompts(batch, self._rollout_ranks, length, self._tokenizer)
        options = self._recipe.train.objective.model_copy(update={"grpo": GRPORecipe(mask_truncated=False)})
        seed = int(fingerprint([self._recipe.seed, batch.step])[:8], 16)
        groups = sample_answers(model, self._tokenizer, prompts, sampling_params(length, seed), 1, self._ping)
        rollouts = [[Rollout(prompt, one, 0.0) for one in group] for prompt, group in zip(prompts, groups, strict=True)]
        zeros = np.zeros((len(rollouts), 1), dtype=np.float32)
        seq_len = batch.inputs.shape[1]
        packed = pack_rollouts(rollouts, zeros, seq_len, options, self._tokenizer.eos_token_id)
        totals = self._rollout_ranks.sum(lambda: total_rollouts(rollouts, mask_truncated=False, rows=packed.count))
        require_prompts(totals, seq_len - length)
        sampled, _ = packed.to_batch(batch, totals.most_rows)
        return replace(sampled, sources=[name and batch.sources[0] for name in sampled.sources],
                       global_valid_tokens=totals.counted_tokens)  # fmt: skip
