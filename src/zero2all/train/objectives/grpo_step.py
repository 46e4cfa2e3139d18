"""The step of GRPO: sample completions with the weights of this step, score them, train on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from zero2all.base.errors import Z2aError
from zero2all.base.io import fingerprint
from zero2all.generation import Completion
from zero2all.model import IGNORE_INDEX, document_starts
from zero2all.parallel import ParallelModel
from zero2all.parallel.mesh import split_batch
from zero2all.recipe import Recipe
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.tokens.conversation_rows import ConversationRows, best_fit_decreasing
from zero2all.tokens.token_store import Array
from zero2all.train.data_loader import PADDING_SOURCE, Batch
from zero2all.train.objectives.grpo import RolloutBatch, group_advantages, grpo_losses, rollout_metrics
from zero2all.train.objectives.rollouts import (
    EndpointSampler,
    Prompt,
    Rollout,
    RolloutRanks,
    RolloutTotals,
    load_rewards,
    read_prompt,
    sample_completions,
    sampling_params,
    score_rollouts,
    total_rollouts,
)
from zero2all.train.objectives.step import Rows, StepLoss, StepObjective, with_flags

SOURCE = "rollouts"
VALIDATION_PROMPTS = 64


class GRPOObjective(StepObjective):
    """See ``GRPORecipe``. Sampling depends on the weights, the seed and the step, so that a resumed run repeats it."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        validation: TokenStore,
        ranks: RolloutRanks,
        ping: Callable[[], None] = lambda: None,
    ) -> None:
        self._recipe, self._options, self._tokenizer = recipe, recipe.train.objective.grpo, tokenizer
        self._ranks, self._rewards = ranks, load_rewards(self._options.rewards)
        self._endpoint = None if self._options.endpoint is None else EndpointSampler(self._options, tokenizer)
        self._validation, self._ping = validation, ping
        self._rollouts: RolloutBatch | None = None
        self._own: dict[str, float] = {}
        self._divisor = 1.0
        longest = max(stage.seq_len for stage in recipe.train.resolved_stages())
        self._answer_tokens = recipe.train.objective.max_answer_tokens
        if self._answer_tokens >= longest:
            raise Z2aError(
                f"max_answer_tokens ({self._answer_tokens}) leaves no room for a prompt in train.seq_len ({longest})"
            )

    def begin(self, model: ParallelModel, batch: Batch) -> StepLoss:
        options, seq_len = self._options, batch.inputs.shape[1]
        prompts = read_prompts(batch, self._ranks, self._answer_tokens, self._tokenizer)
        seed = int(fingerprint([self._recipe.seed, batch.step])[:8], 16)
        groups = self._sample(model, prompts, seed, options.group_size)
        rewards = torch.tensor([[one.reward for one in group] for group in groups]).reshape(
            len(groups), options.group_size
        )
        advantages = group_advantages(rewards, options).numpy()
        packed = pack_rollouts(groups, advantages, seq_len, self._recipe.train.objective, self._tokenizer.eos_token_id)
        totals = self._ranks.sum(
            lambda: total_rollouts(groups, mask_truncated=options.mask_truncated, rows=packed.count)
        )
        require_prompts(totals, seq_len - self._answer_tokens)
        self._own = totals.metrics
        replaced, rollouts = packed.to_batch(batch, totals.most_rows)
        self._rollouts = rollouts = rollouts.to(model.mesh.device)
        self._divisor = max(1.0, totals.counted_tokens if options.loss == "dapo" else totals.completions)

        def objective(losses_BS: Tensor, chosen: slice | Tensor) -> Tensor:
            return grpo_losses(-losses_BS, rollouts.rows(chosen), options)

        return StepLoss(self._divisor, objective, replaced)

    def _sample(self, model: ParallelModel, prompts: list[Prompt], seed: int, copies: int) -> list[list[Rollout]]:
        """Answers to this rank's prompts; every rank calls it."""
        ranks, params, endpoint = self._ranks, sampling_params(self._answer_tokens, seed), self._endpoint
        if copies == 1:
            params = replace(params, temperature=0.0)
        completions: list[list[Completion]] = []
        if endpoint is None:
            completions = sample_completions(model, self._tokenizer, prompts, params, copies, self._ping)

        def score() -> list[list[Rollout]]:
            given = completions
            if endpoint is not None:
                given = ranks.peers.on_rank0(lambda: endpoint.sample(prompts, params, copies, self._ping), self._ping)
            return score_rollouts(prompts, given, self._rewards, ranks.peers, self._ping)

        return ranks.all.on_all_ranks(score, self._ping)

    def sums(self, model: ParallelModel, losses: Tensor, batch: Batch) -> Tensor:
        assert self._rollouts is not None
        return with_flags(rollout_metrics(-losses, self._rollouts, self._options))

    def loss(self, rows: Rows, batch: Batch) -> float:
        return rows[1][0] / self._divisor

    def metrics(self, rows: Rows) -> dict[str, float]:
        return self._own | {"sampler_gap": rows[2][0] / max(1.0, rows[0][0])}

    def idle_reason(self, batch: Batch, metrics: Mapping[str, float]) -> str | None:
        return why_truncated(self._recipe.train.objective, metrics)

    def validate(self, model: ParallelModel) -> dict[str, float]:
        """The reward of greedy completions to the first prompts of the validation set."""
        found: list[tuple[ConversationRows, int]] = []
        for shards in self._validation.sources.values():
            rows = ConversationRows(shards, self._recipe.train.seq_len, packing=False)
            found += [(rows, row) for row in range(len(rows))][: VALIDATION_PROMPTS - len(found)]
        prompts = [
            read_prompt(*found[place][0].read(found[place][1]), self._tokenizer, place)
            for place in self._ranks.share(len(found))
        ]
        room = self._recipe.train.seq_len - self._answer_tokens
        groups = self._sample(model, [prompt for prompt in prompts if len(prompt.tokens) <= room], 0, copies=1)
        totals = self._ranks.sum(lambda: total_rollouts(groups, mask_truncated=False))
        return {"reward": totals.metrics["reward"]} if totals.completions else {}


def why_truncated(objective: ObjectiveRecipe, metrics: Mapping[str, float]) -> str | None:
    """Why no token of the sampled completions is trained on; None if some are."""
    if metrics.get("truncated_answers") != 1.0 or not objective.grpo.mask_truncated:
        return None
    return (
        f"all completions were cut at {objective.max_answer_tokens} tokens, and are not trained on then: "
        "raise train.objective.max_answer_tokens, or set train.objective.grpo.mask_truncated=false"
    )


def read_prompts(batch: Batch, ranks: RolloutRanks, answer_tokens: int, tokenizer: Tokenizer) -> list[Prompt]:
    """This rank's share of the global batch, without those that leave no room for a completion."""
    start, stop = batch.sample_range
    own, dataset = ranks.share(stop - start), batch.stage.dataset
    samples = dataset.read(start + own.start, start + own.stop)
    found = [
        read_prompt(tokens, mask, tokenizer, start + place)
        for place, tokens, mask in zip(own, samples.tokens, samples.mask, strict=True)
    ]
    return [prompt for prompt in found if len(prompt.tokens) <= dataset.seq_len - answer_tokens]


def require_prompts(totals: RolloutTotals, room: int) -> None:
    if not totals.prompts:
        raise Z2aError(
            f"no prompt of the step has at most {room} tokens (train.seq_len less max_answer_tokens): raise "
            "train.seq_len"
        )


class PackedRollouts:
    """The completions of one rank in rows."""

    def __init__(self, tokens: Array, is_first: Array, columns: list[Array], count: int) -> None:
        """``is_first`` marks the first token of each prompt. The rows after ``count`` are padding."""
        self._tokens, self._is_first, self._columns, self.count = tokens, is_first, columns, count

    def to_batch(self, batch: Batch, most_rows: int) -> tuple[Batch, RolloutBatch]:
        """Padded, so that every rank runs the micro-batches of the one with ``most_rows``."""
        split = split_batch(most_rows, 1, batch.micro_batch_size)
        own = np.arange(split.micro_batches * split.samples)
        real = own < self.count
        chosen = np.where(real, own, 0)
        tokens = torch.from_numpy(self._tokens[chosen])
        columns = [torch.from_numpy(column[chosen] * real[:, None]) for column in self._columns]
        mask = columns[0]
        targets = tokens[:, 1:].clone()
        targets[mask == 0] = IGNORE_INDEX
        replaced = replace(
            batch,
            inputs=tokens[:, :-1],
            targets=targets,
            doc_starts=document_starts(torch.from_numpy(self._is_first[chosen, :-1])),
            sources=[SOURCE if one else PADDING_SOURCE for one in real.tolist()],
            micro_batch_size=batch.micro_batch_size and split.samples,
            on_device=None,
        )
        return replaced, RolloutBatch(*columns)


def pack_rollouts(
    groups: Sequence[Sequence[Rollout]], advantages: Array, seq_len: int, objective: ObjectiveRecipe, end_of_text: int
) -> PackedRollouts:
    """Prompt and completion of each rollout, several in a row."""
    flat = [
        (one, float(value))
        for group, values in zip(groups, advantages, strict=True)
        for one, value in zip(group, values, strict=True)
    ]
    lengths = np.array([len(one.prompt.tokens) + len(one.completion.tokens) + 1 for one, _ in flat])
    order, starts = best_fit_decreasing(lengths, seq_len + 1)
    shape = (max(1, len(starts) - 1), seq_len + 1)
    tokens, is_first = np.full(shape, end_of_text, dtype=np.int64), np.zeros(shape, dtype=bool)
    mask, values, sampler, weights = (np.zeros(shape, dtype=np.float32) for _ in range(4))
    for row, (begin, end) in enumerate(pairwise(starts)):
        place = 0
        for one, advantage in (flat[number] for number in order[begin:end].tolist()):
            completion = one.completion.tokens
            inside = slice(place + len(one.prompt.tokens), place + len(one.prompt.tokens) + len(completion))
            tokens[row, place : inside.start], tokens[row, inside] = one.prompt.tokens, completion
            sampler[row, inside], values[row, inside] = one.completion.logprobs, advantage
            if not (one.truncated and objective.grpo.mask_truncated):
                mask[row, inside] = 1.0
            weights[row, inside] = _token_weight(objective, len(completion))
            is_first[row, place] = True
            place = inside.stop + 1
        is_first[row, place:] = True  # padding
    is_first[len(starts) - 1 :] = True
    columns = [column[:, 1:] for column in (mask, values, sampler, weights)]
    return PackedRollouts(tokens, is_first, columns, len(starts) - 1)


def _token_weight(objective: ObjectiveRecipe, length: int) -> float:
    """What the loss of a token is multiplied with before all are added."""
    return {"dapo": 1.0, "grpo": 1 / length, "dr_grpo": 1 / objective.max_answer_tokens}[objective.grpo.loss]
