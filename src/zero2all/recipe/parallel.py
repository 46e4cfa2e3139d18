"""The parallelism of a model, and the rules that need no device to check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from zero2all.recipe.features import feature_mistakes
from zero2all.recipe.model import ModelConfig
from zero2all.recipe.sync import SyncRecipe
from zero2all.recipe.training import TrainRecipe
from zero2all.recipe.types import Degree, LocalDir, Mistake, Section

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
SPLIT_BACKWARD_SCHEDULES = ("zero-bubble", "zbv")
"""Schedules that split the backward pass in two."""


class ParallelRecipe(Section):
    """How the model is parallelized. By default all ranks shard one model (FSDP).

    The product of dp_replicate, dp_shard, cp, tp and pp is the number of ranks; ep reuses ranks of dp_shard and cp.
    """

    dp_replicate: Degree | Literal["auto"] = 1
    """Number of replicas of the (sharded) model. On its own this is DDP; with dp_shard it is HSDP. Set it to auto, with
    ``dp_shard: 1``, if the model fits on one rank."""
    dp_shard: Degree | Literal["auto"] = "auto"
    """Number of ranks that shard one replica (FSDP2). auto uses the remaining ranks. Set it to the ranks of a node for
    HSDP, if the network between nodes is slow."""
    tp: Degree = 1
    """Tensor parallelism: number of ranks over which the matrices of a block are sharded. Raise it within a node if a
    block does not fit, or the batch has too few samples for all ranks."""
    sp: bool = True
    """Sequence parallelism: with tp, shard norms and the residual stream along the sequence. Turn it off only if
    ``seq_len`` is not a multiple of cp x tp."""
    async_tp: bool = False
    """With tp, overlap matrix products with the all-gathers and reduce-scatters around them, in torch.compile on GPUs
    with NVLink (symmetric memory). Turn it on if these collectives limit the step."""
    pp: Degree = 1
    """Pipeline parallelism: number of pipeline ranks. Raise it if the model does not fit with dp_shard and tp, or
    gathering its weights between nodes is too slow."""
    schedule: PipelineSchedule = "1f1b"
    """Pipeline schedule. interleaved, zero-bubble and zbv put two stages on each rank. Change it to one of them if the
    bubble is large; gpipe only takes more memory."""
    cp: Degree = 1
    """Context parallelism: number of ranks over which each sequence is split. Raise it if the activations of one
    sequence do not fit on a rank."""
    cp_attention: Literal["allgather", "ring", "ulysses"] = "allgather"
    """Attention with cp. allgather: each rank gathers all keys and values. ring: they pass from rank to rank, and each
    rank holds only a few parts at a time. ulysses: each rank has all positions of some heads. Set it to ring if
    gathered keys and values do not fit."""
    ep: Degree = 1
    """Expert parallelism: number of ranks over which the experts of each MoE layer are distributed. Raise it if
    gathering all experts of a layer takes too much memory or time."""
    zero: Literal[1, 2, 3] = 3
    """ZeRO stage: what the ranks of dp_shard and cp shard. 1: optimizer state and fp32 master weights. 2: also
    gradients. 3: also the weights that compute, which 1 and 2 gather once per step. 1 also reduce-scatters only once,
    but holds the unsharded fp32 gradient, 4 bytes per parameter. Lower it if memory allows and communication limits the
    step."""
    offload: Literal["none", "cpu"] | LocalDir = "none"
    """Where the shards live: fp32 weights, their gradients and the optimizer state. cpu: in host memory, and the
    optimizer runs on the CPU. A directory on each node, such as /nvme: as cpu, with AdamW's state in memory-mapped
    files there. Set it if the shards do not fit in GPU memory, also on one GPU."""
    reshard_after_forward: Literal["auto", "always", "never"] | Degree = "auto"
    """Whether FSDP frees a block's gathered weights after its forward pass, or reshards them to groups of N ranks. auto
    frees them with zero=3, unless pp is used. Set it to never if memory allows and all-gathers limit the step."""
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which ranks send gradients to reduce them (DDP, FSDP, HSDP). bf16 halves the bytes, and rounds each sum
    of ranks; micro-batches of a rank are added up in fp32 in any case. Set it to bf16 if the network limits the
    step."""
    activation_checkpointing: Literal["none", "full", "selective", "budget"] = "none"
    """What the backward pass recomputes: nothing, each block (full), everything except matmuls and attention
    (selective), or as much as a budget requires. Set it to selective if activations do not fit, then to full."""
    activation_checkpointing_every: Degree = 1
    """With ``full``: number of consecutive blocks that the backward pass recomputes together. One input is stored per
    group, and the activations of one group are in memory at a time. Raise it for a deep model whose stored inputs do
    not fit."""
    activation_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Fraction of activations that are kept with ``budget``. Lower it if memory runs out, and raise it if memory is
    left."""
    activation_offload: bool = False
    """Keep activations in pinned main memory instead of GPU memory between forward and backward pass: all that blocks
    save, or with activation_checkpointing=full their inputs. A side stream copies them; blocks are not compiled. Turn
    it on if activations do not fit and the link to the host is fast."""
    sync: SyncRecipe = SyncRecipe()
    """How replicas of the model are synchronized, for networks that are slower than the GPUs."""

    def mistakes(self) -> Iterator[Mistake]:
        if self.dp_replicate == "auto" and self.dp_shard == "auto":
            yield Mistake(
                "only one of dp_replicate and dp_shard can be auto: set dp_shard=1 for plain copies (DDP)",
                ("dp_replicate", "dp_shard"),
            )
        if self.zero < 3 and self.reshard_after_forward not in ("auto", "never"):
            yield Mistake(
                f"zero={self.zero} keeps the gathered weights for the whole step: set reshard_after_forward=auto, or "
                "zero=3",
                ("zero", "reshard_after_forward"),
            )
        if self.offload != "none" and self.dp_replicate != 1:
            yield Mistake(
                "offload is for shards, and replicas would fill host memory with copies: set dp_replicate=1",
                ("offload", "dp_replicate"),
            )
        yield from self._activation_mistakes()

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether gradients are sharded between the micro-batches of a step."""
        return self.zero > 1

    def _activation_mistakes(self) -> Iterator[Mistake]:
        if self.activation_checkpointing_every > 1 and self.activation_checkpointing != "full":
            yield Mistake(
                "activation_checkpointing_every is the number of blocks that are recomputed together: set "
                "activation_checkpointing=full, or activation_checkpointing_every=1",
                ("activation_checkpointing_every", "activation_checkpointing"),
            )
        if self.activation_checkpointing_every > 1 and self.activation_offload:
            yield Mistake(
                "the inputs of groups of blocks are not offloaded: set activation_checkpointing_every=1, or "
                "activation_offload=false",
                ("activation_checkpointing_every", "activation_offload"),
            )
        if self.activation_offload and self.activation_checkpointing == "selective":
            yield Mistake(
                "what selective checkpointing keeps is not offloaded: set activation_checkpointing=none or full, or "
                "activation_offload=false",
                ("activation_offload", "activation_checkpointing"),
            )

    @field_validator("offload")
    @classmethod
    def _path_has_a_slash(cls, offload: str | Path) -> str | Path:
        if isinstance(offload, Path) and len(offload.parts) == 1:  # cpu, misspelled
            raise ValueError("must be none, cpu, or a directory with a slash, such as /nvme")
        return offload

    @property
    def offload_dir(self) -> Path | None:
        """Directory of the files with the optimizer state."""
        return self.offload if isinstance(self.offload, Path) else None

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.pp > 1 and self.schedule in ("interleaved", *SPLIT_BACKWARD_SCHEDULES) else 1


def parallel_mistakes(model: ModelConfig, train: TrainRecipe, parallel: ParallelRecipe) -> Iterator[Mistake]:
    """Everything that is impossible with any number of ranks; each message names what to change."""
    yield from _tensor_parallel_mistakes(model, parallel)
    yield from _context_parallel_mistakes(model, train, parallel)
    if parallel.activation_checkpointing == "budget" and train.compile is False:
        yield Mistake(
            "the compiler keeps the activation budget: remove train.compile=false, or set "
            "parallel.activation_checkpointing=selective",
            ("parallel.activation_checkpointing", "train.compile"),
        )
    yield from _dropout_mistakes(model, parallel)
    if parallel.activation_offload and (parallel.activation_checkpointing == "budget" or train.compile is True):
        yield Mistake(
            "activation_offload sees what eager operations save, not compiled ones: set train.compile=auto and "
            "parallel.activation_checkpointing=none or full, or parallel.activation_offload=false",
            ("parallel.activation_offload", "train.compile", "parallel.activation_checkpointing"),
        )
    if model.mtp_weight > 0 and max(parallel.tp, parallel.pp, parallel.cp) > 1:
        yield Mistake(
            "the multi-token prediction block is not sharded: set model.mtp_weight=0 or use dp_shard instead of tp, "
            "pp, cp",
            ("model.mtp_weight", "parallel.tp", "parallel.pp", "parallel.cp"),
        )
    if parallel.pp > 1:
        yield from _pipeline_mistakes(model, train, parallel)
    yield from _expert_mistakes(model, parallel)
    if model.lora is not None and max(parallel.tp, parallel.ep) > 1:
        yield Mistake(
            "adapters (model.lora) are not sharded by tp and ep: use dp_shard, which shards everything",
            ("parallel.tp", "parallel.ep", "model.lora"),
        )
    if parallel.sync.islands > 1 and train.guard.policy == "rollback":
        yield Mistake(
            "an island cannot roll back, since the others would go on: set train.guard.policy=skip or warn",
            ("train.guard.policy", "parallel.sync.islands"),
        )
    if train.float8 is not None:
        yield from _float8_mistakes(model, train, parallel)
    yield from feature_mistakes(train, parallel)
    if (objective := train.objective.loaded) is not None and objective.weighs_tokens:
        yield from _completion_mistakes(model, train)


def _dropout_mistakes(model: ModelConfig, parallel: ParallelRecipe) -> Iterator[Mistake]:
    if model.attention_dropout and parallel.cp > 1:
        yield Mistake(
            "attention over cp ranks has no dropout: set model.attention_dropout=0 or parallel.cp=1",
            ("model.attention_dropout", "parallel.cp"),
        )
    if model.attention_dropout and parallel.tp > 1 and not parallel.sp:
        yield Mistake(
            "without sp all tp ranks draw the same numbers, so that their heads would share one dropout mask: set "
            "parallel.sp=true or model.attention_dropout=0",
            ("model.attention_dropout", "parallel.sp", "parallel.tp"),
        )


def _completion_mistakes(model: ModelConfig, train: TrainRecipe) -> Iterator[Mistake]:
    objective = f"train.objective.name={train.objective.name}"
    if model.mtp_weight > 0:
        yield Mistake(
            f"{objective} does not train multi-token prediction: set model.mtp_weight=0",
            ("model.mtp_weight", "train.objective.name"),
        )
    if model.ops.cross_entropy == "liger":
        yield Mistake(
            f"{objective} weighs tokens differently, which Liger's gradient does not: set "
            "model.ops.cross_entropy=chunked",
            ("model.ops.cross_entropy", "train.objective.name"),
        )


def _tensor_parallel_mistakes(model: ModelConfig, parallel: ParallelRecipe) -> Iterator[Mistake]:
    if parallel.async_tp and (parallel.tp == 1 or not parallel.sp):
        yield Mistake(
            "parallel.async_tp overlaps the collectives of tp with sp: set parallel.tp above 1 and parallel.sp=true, "
            "or parallel.async_tp=false",
            ("parallel.async_tp", "parallel.tp", "parallel.sp"),
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(model, name)
        if size % parallel.tp:
            yield Mistake(
                f"parallel.tp ({parallel.tp}) must divide model.{name} ({size})", ("parallel.tp", f"model.{name}")
            )
    rows = 0 if model.vocab_size is None else model.padded_vocab_size
    if rows % parallel.tp:
        yield Mistake(
            f"parallel.tp ({parallel.tp}) must divide the {rows} rows of the vocabulary",
            ("parallel.tp", "model.vocab_size"),
        )


def _context_parallel_mistakes(model: ModelConfig, train: TrainRecipe, parallel: ParallelRecipe) -> Iterator[Mistake]:
    chunks = 2 * parallel.cp if parallel.cp > 1 else 1
    shards = parallel.cp * parallel.tp if parallel.sp else parallel.cp
    for length, keys in train.keys_by_seq_len().items():
        if length % chunks:
            yield Mistake(
                f"train.seq_len ({length}) must be a multiple of 2 x parallel.cp ({chunks})", ("parallel.cp", *keys)
            )
        if length % shards:
            yield Mistake(
                f"train.seq_len ({length}) must be a multiple of cp x tp ({shards}); or set parallel.sp=false",
                ("parallel.cp", "parallel.tp", "parallel.sp", *keys),
            )
    heads = parallel.cp * parallel.tp if parallel.cp > 1 and parallel.cp_attention == "ulysses" else 1
    if model.num_key_value_heads % heads:
        yield Mistake(
            f"ulysses shards model.num_key_value_heads ({model.num_key_value_heads}) over cp x tp ({heads}) ranks: "
            "set parallel.cp_attention=allgather",
            ("parallel.cp_attention", "parallel.cp", "parallel.tp", "model.num_key_value_heads"),
        )


def _pipeline_mistakes(model: ModelConfig, train: TrainRecipe, parallel: ParallelRecipe) -> Iterator[Mistake]:
    stages = parallel.pp * parallel.stages_per_rank
    if stages > model.num_hidden_layers:
        yield Mistake(
            f"{stages} pipeline stages need as many layers, and model.num_hidden_layers is "
            f"{model.num_hidden_layers}: lower parallel.pp"
            + (" or set parallel.schedule=1f1b" if parallel.stages_per_rank > 1 else ""),
            ("parallel.pp", "parallel.schedule", "model.num_hidden_layers"),
        )
    if model.tie_word_embeddings:
        yield Mistake(
            "embedding and head are on different pipeline stages: set model.tie_word_embeddings=false or parallel.pp=1",
            ("parallel.pp", "model.tie_word_embeddings"),
        )
    if model.moe is not None and model.moe.load_balancing == "aux":
        yield Mistake(
            "the balance loss of early pipeline stages would be lost: set model.moe.load_balancing=bias",
            ("parallel.pp", "model.moe.load_balancing"),
        )
    if parallel.schedule in SPLIT_BACKWARD_SCHEDULES:
        yield from _split_backward_mistakes(train, parallel)


def _split_backward_mistakes(train: TrainRecipe, parallel: ParallelRecipe) -> Iterator[Mistake]:
    if train.compile is True or parallel.activation_checkpointing == "budget":
        yield Mistake(
            f"schedule {parallel.schedule} cannot split a compiled backward: set train.compile=false (and no "
            "activation budget), or parallel.schedule=interleaved",
            ("parallel.schedule", "parallel.pp", "train.compile", "parallel.activation_checkpointing"),
        )
    if parallel.reshard_after_forward not in ("auto", "never"):
        yield Mistake(
            f"schedule {parallel.schedule} loses the weight gradients of blocks that free their gathered weights: "
            "set parallel.reshard_after_forward=auto, or parallel.schedule=interleaved",
            ("parallel.schedule", "parallel.pp", "parallel.reshard_after_forward"),
        )
    if parallel.activation_checkpointing == "selective":
        yield Mistake(
            f"schedule {parallel.schedule} recomputes a block twice, but what selective checkpointing keeps serves "
            "once: set parallel.activation_checkpointing=full, or parallel.schedule=interleaved",
            ("parallel.schedule", "parallel.pp", "parallel.activation_checkpointing"),
        )


def _float8_mistakes(model: ModelConfig, train: TrainRecipe, parallel: ParallelRecipe) -> Iterator[Mistake]:
    if parallel.tp > 1:
        yield Mistake(
            "matrices that tp shards are not converted to float8: set parallel.tp=1 and use dp_shard, or remove "
            "train.float8",
            ("train.float8", "parallel.tp"),
        )
    if model.lora is not None:
        yield Mistake(
            "matrices with adapters (model.lora) are not converted to float8: remove train.float8",
            ("train.float8", "model.lora"),
        )
    if train.precision == "fp16":
        yield Mistake(
            "float8 is rounded from bf16: set train.precision=bf16, or remove train.float8",
            ("train.float8", "train.precision"),
        )


def _expert_mistakes(model: ModelConfig, parallel: ParallelRecipe) -> Iterator[Mistake]:
    moe = model.moe
    if moe is None:
        if parallel.ep > 1:
            yield Mistake(
                f"parallel.ep is {parallel.ep}, but the model has no experts: set it to 1, or give model.moe",
                ("parallel.ep", "model.moe"),
            )
        return
    if moe.num_experts % parallel.ep:
        yield Mistake(
            f"parallel.ep ({parallel.ep}) must divide model.moe.num_experts ({moe.num_experts})",
            ("parallel.ep", "model.moe.num_experts"),
        )
    if parallel.tp > 1:
        yield Mistake(
            "experts are not sharded by tp: set parallel.tp=1 and share them with parallel.ep",
            ("parallel.tp", "model.moe"),
        )
