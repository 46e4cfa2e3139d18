"""Pipeline parallel: layers in stages, micro-batches passing through them.

A stage is the full model without the other stages' layers; it runs the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero2all.base.errors import UsageError
from zero2all.model import ModelInputs, Z2all
from zero2all.parallel.gradient_sync import pipeline_stage_class
from zero2all.parallel.mesh import ParallelMesh
from zero2all.recipe import ModelConfig, ParallelRecipe

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


SequenceObjective = Callable[[Tensor, slice | Tensor], Tensor]
"""Losses [B, S] of some of this rank's samples, and which these are, to values whose sum is to be minimized."""


class StageInput(nn.Module):
    """Replaces the embedding on later stages: returns what the previous stage sent."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0), persistent=False)  # gives init_weights the device
        self.stream: Tensor | None = None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        assert self.stream is not None, "a later stage was run without the one before it"
        stream, self.stream = self.stream, None
        return stream


class StageOutput(nn.Module):
    """Replaces the head on earlier stages: the residual stream goes to the next stage as it is."""

    def forward(self, x_BSD: Tensor, **wanted: Any) -> Tensor:
        return x_BSD


class StageWrapper(nn.Module):
    """What a schedule runs: the residual stream in (tokens at the first stage), stream or losses out.

    Without targets, as in generation, the last stage returns logits.
    """

    def __init__(self, model: Z2all) -> None:
        super().__init__()
        self.model = model

    def forward(self, stream: Tensor, **inputs: Any) -> Tensor:
        """``inputs`` are the fields of ``ModelInputs``: a schedule divides keyword arguments, not records."""
        if isinstance(self.model.embed_tokens, StageInput):
            self.model.embed_tokens.stream = stream
        if isinstance(self.model.lm_head, StageOutput):
            inputs["targets_BS"] = None
        out: Tensor = self.model(ModelInputs(**inputs))
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
    """Consecutive layers for each stage, so that the most expensive stage is as cheap as possible.

    >>> split_layers([1, 1, 1, 4], 2)
    [range(0, 3), range(3, 4)]
    """
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[n][k]: the most expensive of k stages over the first n layers, and where the last of them begins.
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


def stage_indices_of_rank(recipe: ParallelRecipe, pp_rank: int) -> list[int]:
    """The stages of a pipeline rank: every pp-th, or for zbv there and back, so that the first has the last too."""
    if recipe.schedule == "zbv":
        return [pp_rank, 2 * recipe.pp - 1 - pp_rank]
    return [pp_rank + turn * recipe.pp for turn in range(recipe.stages_per_rank)]


def micro_batches_in_flight(recipe: ParallelRecipe, pp_rank: int, micro_batches: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at most, over all its stages; an estimate.

    1F1B runs as many ahead as there are stages after it (https://arxiv.org/abs/2104.04473, also interleaved). Schedules
    that split the backward pass keep the inputs of delayed weight gradients (https://arxiv.org/abs/2401.10241).
    """
    pp, turns = recipe.pp, recipe.stages_per_rank
    if pp == 1:
        return 1.0
    stage_passes = {
        "gpipe": micro_batches,
        "1f1b": pp - pp_rank,
        "interleaved": 2 * (pp - pp_rank - 1) + (turns - 1) * pp + 1,
    }.get(recipe.schedule, turns * pp)
    return min(stage_passes, turns * micro_batches) / turns


def broadcast_from_head(message: Tensor, recipe: ParallelRecipe, mesh: ParallelMesh) -> None:
    """Among the ranks that read the same samples: what the first one with the last pipeline stage has.

    One dimension of the mesh after the other: a group over several of them would be one more.
    """
    stages = recipe.pp * recipe.stages_per_rank
    has_last = [stages - 1 in stage_indices_of_rank(recipe, rank) for rank in range(recipe.pp)]
    for dimension, source in (("pp", has_last.index(True)), ("cp", 0), ("tp", 0)):
        if getattr(mesh.dims, dimension) > 1:
            dist.broadcast(message, group=mesh.get_mesh(dimension).get_group(), group_src=source)


def build_stage_module(config: ModelConfig, layers: range, *, first: bool, last: bool) -> Z2all:
    """The model with only some layers, under their own names; without embedding or head unless at an end."""
    model = Z2all(config)
    for number in range(config.num_hidden_layers):
        if number not in layers:
            delattr(model.layers, str(number))
    if not first:
        model.embed_tokens = StageInput()  # type: ignore[assignment]
    if not last:
        model.norm = nn.Identity()  # type: ignore[assignment]
        model.lm_head = StageOutput()  # type: ignore[assignment]
    return model


def merge_stages(config: ModelConfig, model_parts: Sequence[Z2all]) -> Z2all:
    """One module over all that a rank holds, with the names of the full model: for optimizers and checkpoints."""
    if len(model_parts) == 1:
        return model_parts[0]
    merged = build_stage_module(config, range(0), first=False, last=False)
    for part in model_parts:
        for name, block in part.layers.named_children():
            merged.layers.add_module(name, block)
        if not isinstance(part.embed_tokens, StageInput):
            merged.embed_tokens = part.embed_tokens
        if not isinstance(part.lm_head, StageOutput):
            merged.norm, merged.lm_head = part.norm, part.lm_head
    return merged


class Pipeline:
    """Runs micro-batches through the stages of all ranks."""

    def __init__(
        self, stages: list[StageWrapper], stage_indices: list[int], recipe: ParallelRecipe, mesh: ParallelMesh
    ) -> None:
        self.stages, self.stage_indices, self.recipe, self.mesh = stages, stage_indices, recipe, mesh
        self.num_stages = recipe.pp * recipe.stages_per_rank
        self.has_last_stage = self.num_stages - 1 in stage_indices
        self.divisor = 1.0
        self.objective: SequenceObjective | None = None
        # The last one for training and the last one for evaluation: each holds buffers for all its micro-batches, and
        # a batch that grows would leave one behind at every size.
        self._schedules: dict[bool, tuple[tuple[Any, ...], Any]] = {}

    def run(
        self,
        inputs: ModelInputs,
        n_microbatches: int,
        divisor: float | None,
        stream: Tensor,
        objective: SequenceObjective | None = None,
    ) -> Tensor | None:
        """Forward, and with a divisor backward, of ``n_microbatches``; returns the losses on the last stage.

        ``stream`` has the shape and type of what passes between stages for one micro-batch; its content is not read.
        """
        self.divisor, self.objective = divisor or 1.0, objective
        tokens_BS, targets_BS = inputs.tokens_BS, inputs.targets_BS
        assert targets_BS is not None
        key, trains = (n_microbatches, stream.shape, stream.dtype, targets_BS.shape), divisor is not None
        if self._schedules.get(trains, (None,))[0] != key:
            self._schedules.pop(trains, None)  # before the new one, or both would be in memory
            self._schedules[trains] = key, self._build_schedule(n_microbatches, stream, targets_BS)
        given = (tokens_BS,) if 0 in self.stage_indices else ()
        rows = torch.arange(len(targets_BS), device=targets_BS.device) if self.has_last_stage else None
        schedule = self._schedules[trains][1]
        run = schedule.step if trains else schedule.eval
        seeds = {} if inputs.dropout_seeds_M is None else {"dropout_seeds_M": inputs.dropout_seeds_M}
        losses: Tensor | None = run(*given, target=rows, **inputs.batch_tensors(), **seeds)
        return losses

    def generate_logits(self, inputs: ModelInputs, stream: Tensor) -> Tensor | None:
        """The forward pass of one batch with a KV cache, stage by stage; returns the logits on the last stage.

        ``stream`` is as in ``run``.
        """
        group = self.mesh.get_mesh("pp").get_group()
        ranks = {stage: rank for rank in range(self.recipe.pp) for stage in stage_indices_of_rank(self.recipe, rank)}
        own, out = group.rank(), inputs.tokens_BS
        for stage, number in sorted(zip(self.stages, self.stage_indices, strict=True), key=itemgetter(1)):
            if number > 0 and ranks[number - 1] != own:
                out = torch.empty_like(stream, device=self.mesh.device)
                dist.recv(out, group=group, group_src=ranks[number - 1])
            out = stage(out, **vars(inputs))
            if number < self.num_stages - 1 and ranks[number + 1] != own:
                dist.send(out.contiguous(), group=group, group_dst=ranks[number + 1])
        return out if self.has_last_stage else None

    def _build_schedule(self, n_microbatches: int, stream: Tensor, targets_BS: Tensor) -> Any:
        from torch.distributed import pipelining  # imports the compiler: a restart without a pipeline need not wait

        kind = getattr(pipelining, SCHEDULES[self.recipe.schedule])
        stage_kind = pipeline_stage_class(self.recipe, self.mesh.dims.dp_replicate)
        samples = targets_BS.shape[0] // n_microbatches
        stream = stream.to("meta").requires_grad_()
        tokens = torch.empty(samples, targets_BS.shape[1], dtype=torch.int64, device="meta")
        stages = [
            stage_kind(
                stage,
                number,
                self.num_stages,
                self.mesh.device,
                input_args=tokens if number == 0 else stream,
                output_args=tokens.float().requires_grad_() if number == self.num_stages - 1 else stream,
                group=self.mesh.get_mesh("pp").get_group(),
            )
            for stage, number in zip(self.stages, self.stage_indices, strict=True)
        ]
        try:
            return kind(
                stages if self.recipe.stages_per_rank > 1 else stages[0],
                n_microbatches=n_microbatches,
                loss_fn=self._loss,
                scale_grads=False,
            )
        except ValueError as error:
            raise UsageError(
                f"schedule {self.recipe.schedule} cannot run {n_microbatches} micro-batches "
                f"in {self.num_stages} stages ({error}): "
                "change train.micro_batch_tokens or parallel.schedule"
            ) from error

    def _loss(self, losses_BS: Tensor, rows_B: Tensor) -> Tensor:
        value = losses_BS if self.objective is None else self.objective(losses_BS, rows_B)
        return value.sum() / self.divisor
