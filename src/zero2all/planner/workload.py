"""What a step computes, and how it is laid out over ranks. Everything that a plan is computed from."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zero2all.base.errors import UsageError
from zero2all.base.machine.devices import compute_dtype, dtype_name
from zero2all.model import Z2all
from zero2all.model.cost.flops import Flops, Recompute, flops_per_token, palm_flops_per_token
from zero2all.model.cost.model_size import optimizer_state_bytes
from zero2all.parallel.fsdp import reshard_after_forward
from zero2all.parallel.mesh import BatchSplit, ParallelDims, split_stage
from zero2all.parallel.pipeline_parallel import split_layers, stage_indices_of_rank
from zero2all.recipe import ModelConfig, OptimizerRecipe, ParallelRecipe, Recipe, ResolvedStage
from zero2all.recipe.load import with_vocab_size
from zero2all.recipe.objective import ObjectiveRecipe

GPU = torch.device("cuda")


@dataclass(frozen=True)
class Split:
    """A sum over parameters, by how ranks divide them."""

    by_tp: float = 0
    by_ep: float = 0
    whole: float = 0

    def __add__(self, other: Split) -> Split:
        return Split(self.by_tp + other.by_tp, self.by_ep + other.by_ep, self.whole + other.whole)

    @property
    def total(self) -> float:
        return self.by_tp + self.by_ep + self.whole

    def on_rank(self, tp: int, ep: int) -> float:
        """Before FSDP shards it further."""
        return self.by_tp / tp + self.by_ep / ep + self.whole


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers together: the embedding, a block, or last norm and head."""

    elements: Split = Split()
    trained: Split = Split()
    """Elements that have a gradient: with LoRA the adapters alone."""
    state: Split = Split()
    """Bytes of optimizer state."""

    def __add__(self, other: Unit) -> Unit:
        return Unit(self.elements + other.elements, self.trained + other.trained, self.state + other.state)

    @staticmethod
    def sum(units: Iterable[Unit]) -> Unit:
        return functools.reduce(Unit.__add__, units, Unit())


@dataclass(frozen=True)
class ModelParts:
    """The parameters of a model, by unit."""

    first: Unit
    blocks: tuple[Unit, ...]
    last: Unit
    rest: Unit
    """What stays gathered for the whole step: an embedding that is also the head, and multi-token prediction."""
    looked_up: int
    """Elements of an embedding that no token is multiplied with."""

    @functools.cached_property
    def all_blocks(self) -> Unit:
        return Unit.sum(self.blocks)

    @functools.cached_property
    def all(self) -> Unit:
        return Unit.sum((self.first, self.all_blocks, self.last, self.rest))

    @property
    def total(self) -> int:
        return round(self.all.elements.total)

    def of_stages(self, stages: Sequence[range]) -> Unit:
        """All of some pipeline stages."""
        layers = {layer for stage in stages for layer in stage}
        ends = [*([self.first] if 0 in layers else []), *([self.last] if len(self.blocks) - 1 in layers else [])]
        return Unit.sum((*(self.blocks[layer] for layer in layers), *ends, self.rest))


def model_parts(config: ModelConfig, optimizer: OptimizerRecipe) -> ModelParts:
    """Counted on one layer of each kind on the meta device: a 70B model takes seconds to build even there."""
    ends: dict[str, Unit] = {}
    blocks: dict[bool, Unit] = {}
    kinds = {config.is_moe_layer(layer) for layer in range(config.num_hidden_layers)}
    for is_moe in kinds:
        model = _one_layer_model(config, is_moe=is_moe)
        units: dict[str, Unit] = {}
        for name, parameter in model.named_parameters():
            where = name.partition(".")[0]
            elements = _split(name, parameter.numel())
            if parameter.requires_grad:
                state = optimizer_state_bytes(optimizer, name, parameter.shape)
                unit = Unit(elements, elements, _split(name, state))
            else:
                unit = Unit(elements)
            units[where] = units.get(where, Unit()) + unit
        blocks[is_moe] = units.pop("layers")
        ends = units  # the same in both
    embedding, head = ends["embed_tokens"], ends.get("norm", Unit()) + ends.get("lm_head", Unit())
    together = config.tie_word_embeddings or config.mtp_weight > 0
    return ModelParts(
        first=Unit() if together else embedding,
        blocks=tuple(blocks[config.is_moe_layer(layer)] for layer in range(config.num_hidden_layers)),
        last=Unit() if together else head,
        rest=(embedding + head if together else Unit()) + ends.get("mtp", Unit()),
        looked_up=0 if config.tie_word_embeddings else round(embedding.elements.total),
    )


def _one_layer_model(config: ModelConfig, *, is_moe: bool) -> Z2all:
    moe = config.moe.model_copy(update={"first_k_dense_replace": 0}) if config.moe and is_moe else None
    with torch.device("meta"):
        return Z2all(config.model_copy(update={"num_hidden_layers": 1, "moe": moe}))


def _split(name: str, value: float) -> Split:
    if ".experts." in name:
        return Split(by_ep=value)
    return Split(whole=value) if "norm" in name or ".gate." in name else Split(by_tp=value)


@dataclass(frozen=True, eq=False)
class Workload:
    """A stage of training, independent of its layout."""

    config: ModelConfig
    optimizer: OptimizerRecipe
    parts: ModelParts
    flops: Flops
    """FLOPs of one token."""
    seq_len: int
    batch_tokens: int
    precision: str
    """``fp32``, ``bf16`` or ``fp16``."""
    float8: bool
    objective: ObjectiveRecipe

    @classmethod
    def of(cls, recipe: Recipe, stage: ResolvedStage, device: torch.device = GPU) -> Workload:
        recipe = with_vocab_size(recipe)
        return cls(
            config=recipe.model,
            optimizer=recipe.train.optimizer,
            parts=model_parts(recipe.model, recipe.train.optimizer),
            flops=flops_per_token(recipe.model, stage.seq_len),
            seq_len=stage.seq_len,
            batch_tokens=stage.batch_tokens,
            precision=dtype_name(planned_dtype(recipe, device)),
            float8=recipe.train.float8 is not None,
            objective=recipe.train.objective,
        )

    @functools.cached_property
    def active_parameters(self) -> int:
        """Parameters that a token goes through: of the experts, only its own."""
        moe, experts = self.config.moe, self.parts.all.elements.by_ep
        idle = 0.0 if moe is None else experts * (1 - moe.num_experts_per_tok / moe.num_experts)
        return round(self.parts.total - idle)

    @functools.cached_property
    def palm_flops(self) -> int:
        """FLOPs of one token, by 6N + 12LHQT."""
        return palm_flops_per_token(self.config, self.active_parameters, self.seq_len)

    @property
    def last_layer(self) -> int:
        return self.config.num_hidden_layers - 1

    @property
    def half(self) -> bool:
        return self.precision != "fp32"

    @property
    def itemsize(self) -> int:
        return 2 if self.half else 4

    @functools.cached_property
    def layer_costs(self) -> tuple[int, ...]:
        """The same costs as ``parallel.pipeline_parallel.layer_costs``, which builds the model."""
        costs = [round(block.elements.total) for block in self.parts.blocks]
        costs[0] += self.config.hidden_size
        costs[-1] += self.config.hidden_size * self.config.padded_vocab_size
        return tuple(costs)

    def stages(self, count: int) -> list[range]:
        """The layers of each of ``count`` pipeline stages."""
        return _split_layers(self.layer_costs, count)


@dataclass(frozen=True)
class Layout:
    """How a step is laid out over ranks."""

    dims: ParallelDims
    parallel: ParallelRecipe
    batch: BatchSplit
    seq_len: int
    stages_per_rank: int

    @classmethod
    def of(cls, recipe: Recipe, stage: ResolvedStage, gpus: int) -> Layout:
        dims = ParallelDims.from_recipe(recipe.parallel, gpus)
        batch = split_stage(stage, recipe.parallel, dims)
        return cls(dims, recipe.parallel, batch, stage.seq_len, recipe.parallel.stages_per_rank)

    @property
    def micro_tokens(self) -> int:
        """Tokens of a rank in one forward pass."""
        return self.batch.samples * self.seq_len // self.dims.cp

    @property
    def step_tokens(self) -> int:
        """Tokens that go through a rank in a step."""
        return self.micro_tokens * self.batch.micro_batches

    @property
    def shards(self) -> int:
        """Ranks over which FSDP shards: the cp ranks too."""
        return self.dims.dp_shard * self.dims.cp

    @property
    def uses_fsdp(self) -> bool:
        """Whether ``parallelize`` uses FSDP: copies of a full model are left to DDP, unless they are offloaded."""
        reduces = self.dims.dp * self.dims.cp > 1 and self.dims.dp_replicate != self.dims.world_size
        return reduces or self.parallel.offload != "none"

    @property
    def recompute(self) -> Recompute:
        mode = self.parallel.activation_checkpointing
        return "none" if mode == "budget" else mode

    @property
    def accumulates(self) -> bool:
        return self.batch.micro_batches > 1

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether gradients are sharded between the micro-batches of a step."""
        return self.parallel.reduces_every_micro_batch

    @property
    def frees_weights(self) -> bool:
        """Whether FSDP gathers the weights for every forward and every backward, not once per step."""
        return reshard_after_forward(self.parallel) is not False

    def stages_of(self, workload: Workload, pp_rank: int) -> tuple[range, ...]:
        """The layers of each pipeline stage of a rank."""
        stages = workload.stages(self.dims.pp * self.stages_per_rank)
        own = stage_indices_of_rank(self.parallel, pp_rank) if self.dims.pp > 1 else [0]
        return tuple(stages[index] for index in own)


@functools.lru_cache(maxsize=64)
def _split_layers(costs: tuple[int, ...], count: int) -> list[range]:
    return split_layers(costs, count)


def planned_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """A GPU is not asked: auto is taken to be bf16 on it."""
    precision = recipe.train.compute_precision
    return compute_dtype("bf16" if precision == "auto" and device.type == "cuda" else precision, device)


def largest_stage(recipe: Recipe) -> ResolvedStage:
    """The stage that trains the most; of stages whose length is in epochs, the first."""
    stages = recipe.train.resolved_stages()

    def tokens(stage: ResolvedStage) -> float:
        length = stage.duration
        per_unit = {"tokens": 1.0, "steps": float(stage.batch_tokens), "epochs": 0.0}
        return length.value * per_unit[length.unit]

    if not stages:
        raise UsageError("the recipe trains nothing: set train.tokens")
    return max(stages, key=tokens)


def zero_stage(parallel: ParallelRecipe) -> int:
    """What the ranks of dp_shard share: 1 is optimizer state and master weights, 2 also gradients, 3 also weights.

    A pipeline keeps its weights, and so does ``reshard_after_forward: never``: a lower stage than ``zero`` says.
    """
    if not parallel.reduces_every_micro_batch:
        return 1
    return 2 if reshard_after_forward(parallel) is False else 3
