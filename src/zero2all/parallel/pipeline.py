"""Pipeline parallel: layers in stages, micro-batches passing through them.

A stage is the whole model with the other stages' parts taken out; it runs the model's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zero2all.errors import UsageError
from zero2all.model import Z2all
from zero2all.parallel.accumulation import stage_class
from zero2all.parallel.layout import Layout
from zero2all.recipe import ModelConfig, ParallelRecipe

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


class Incoming(nn.Module):
    """Stands where the embedding is on the first stage: gives what the stage before has sent."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0), persistent=False)  # tells init_weights the device
        self.stream: Tensor | None = None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        assert self.stream is not None, "a later stage was run without the one before it"
        stream, self.stream = self.stream, None
        return stream


class Stage(nn.Module):
    """What a schedule runs: the residual stream in (tokens at the first stage), stream or losses out."""

    def __init__(self, model: Z2all) -> None:
        super().__init__()
        self.model = model

    def forward(self, stream: Tensor, targets_BS: Tensor, **inputs: Tensor) -> Tensor:
        if isinstance(self.model.embed_tokens, Incoming):
            self.model.embed_tokens.stream = stream
        if not isinstance(self.model.lm_head, nn.Identity):
            inputs["targets_BS"] = targets_BS
        out: Tensor = self.model(**inputs)
        return out


def layer_costs(config: ModelConfig) -> list[int]:
    """Multiplications for one token in each layer; the first also looks up the embedding, the last has the head."""
    with torch.device("meta"):
        model = Z2all(config)
    costs = [sum(parameter.numel() for parameter in block.parameters()) for block in model.layers]
    costs[0] += config.hidden_size
    costs[-1] += model.lm_head.weight.numel()
    return costs


def split_layers(costs: Sequence[int], stages: int) -> list[range]:
    """Consecutive layers for each stage, so that the dearest stage is as cheap as can be.

    >>> split_layers([1, 1, 1, 4], 2)
    [range(0, 3), range(3, 4)]
    """
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[n][k]: the dearest of k stages over the first n layers, and where the last of them begins.
    best: dict[tuple[int, int], tuple[int, int]] = {(0, 0): (0, 0)}
    for count in range(1, stages + 1):
        for end in range(count, len(costs) - stages + count + 1):
            best[end, count] = min(
                (max(best[begin, count - 1][0], total[end] - total[begin]), begin)
                for begin in range(count - 1, end)
                if (begin, count - 1) in best
            )
    ends = [len(costs)]
    for count in range(stages, 0, -1):
        ends.append(best[ends[-1], count][1])
    return [range(begin, end) for end, begin in pairwise(ends)][::-1]


def stage_numbers(recipe: ParallelRecipe, at: int) -> list[int]:
    """The stages of a pipeline rank: every pp-th, or for zbv there and back, so that the first has the last too."""
    if recipe.schedule == "zbv":
        return [at, 2 * recipe.pp - 1 - at]
    return [at + turn * recipe.pp for turn in range(recipe.stages_per_rank)]


def cut(config: ModelConfig, layers: range, first: bool, last: bool) -> Z2all:
    """The model with only some layers, under their own names; without embedding or head unless at an end."""
    model = Z2all(config)
    for number in range(config.n_layers):
        if number not in layers:
            del model.layers._modules[str(number)]
    if not first:
        model.embed_tokens = Incoming()  # type: ignore[assignment]
    if not last:
        model.norm = nn.Identity()  # type: ignore[assignment]
        model.lm_head = nn.Identity()  # type: ignore[assignment]
    return model


def joined(config: ModelConfig, parts: Sequence[Z2all]) -> Z2all:
    """One module over all that a rank holds, with the names of the whole model: for optimizers and checkpoints."""
    if len(parts) == 1:
        return parts[0]
    whole = cut(config, range(0), first=False, last=False)
    for part in parts:
        whole.layers._modules.update(part.layers._modules)
        if not isinstance(part.embed_tokens, Incoming):
            whole.embed_tokens = part.embed_tokens
        if not isinstance(part.lm_head, nn.Identity):
            whole.norm, whole.lm_head = part.norm, part.lm_head
    return whole


class Pipeline:
    """Runs micro-batches through the stages of all ranks."""

    def __init__(self, stages: list[Stage], numbers: list[int], recipe: ParallelRecipe, layout: Layout) -> None:
        self.stages, self.numbers, self.recipe, self.layout = stages, numbers, recipe, layout
        self.count = recipe.pp * recipe.stages_per_rank
        self.has_last = self.count - 1 in numbers
        self.divisor = 1.0
        # The last one for training and the last one for evaluation: each holds buffers for all its micro-batches, and
        # a batch that grows would leave one behind at every size.
        self._schedules: dict[bool, tuple[tuple[Any, ...], Any]] = {}

    def run(self, inputs: dict[str, Tensor], micros: int, divisor: float | None, stream: Tensor) -> Tensor | None:
        """Forward, and with a divisor backward, of a batch in ``micros`` pieces; the losses, where the last stage is.

        ``stream`` has the shape and type of what passes between stages for one piece; its content is not read.
        """
        self.divisor = divisor or 1.0
        tokens_BS, targets_BS = inputs["tokens_BS"], inputs["targets_BS"]
        key, trains = (micros, stream.shape, stream.dtype, targets_BS.shape), divisor is not None
        if self._schedules.get(trains, (None,))[0] != key:
            self._schedules.pop(trains, None)  # before the new one, or both would be in memory
            self._schedules[trains] = key, self._schedule(micros, stream, targets_BS)
        given = (tokens_BS,) if 0 in self.numbers else ()
        target = targets_BS if self.has_last else None
        schedule = self._schedules[trains][1]
        run = schedule.step if trains else schedule.eval
        losses: Tensor | None = run(*given, target=target, **inputs)
        return losses

    def _schedule(self, micros: int, stream: Tensor, targets_BS: Tensor) -> Any:
        from torch.distributed import pipelining  # brings the compiler: a restart without a pipeline need not wait

        kind, stage_kind = getattr(pipelining, SCHEDULES[self.recipe.schedule]), stage_class(self.recipe)
        samples = targets_BS.shape[0] // micros
        stream = stream.to("meta").requires_grad_()
        tokens = torch.empty(samples, targets_BS.shape[1], dtype=torch.int64, device="meta")
        stages = [
            stage_kind(
                stage,
                number,
                self.count,
                self.layout.device,
                input_args=tokens if number == 0 else stream,
                output_args=tokens.float().requires_grad_() if number == self.count - 1 else stream,
                group=self.layout.mesh("pp").get_group(),
            )
            for stage, number in zip(self.stages, self.numbers, strict=True)
        ]
        try:
            return kind(
                stages if self.recipe.stages_per_rank > 1 else stages[0],
                n_microbatches=micros,
                loss_fn=self._loss,
                scale_grads=False,
            )
        except ValueError as error:
            raise UsageError(
                f"schedule {self.recipe.schedule} cannot run {micros} micro-batches in {self.count} stages ({error}): "
                "change train.micro_batch_tokens or parallel.schedule"
            ) from error

    def _loss(self, losses_BS: Tensor, targets_BS: Tensor) -> Tensor:
        return losses_BS.sum() / self.divisor
