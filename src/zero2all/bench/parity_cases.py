"""What ``z2a bench parity`` compares with one process: parallel layouts, and training setups for each."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zero2all.base.errors import UsageError
from zero2all.parallel.mesh import ParallelDims, even_micro_batch_size
from zero2all.recipe import ModelConfig, MoeConfig, OptimizerRecipe, ParallelRecipe, TrainRecipe
from zero2all.recipe.model import LoraConfig
from zero2all.recipe.parallel import parallel_mistakes

SAMPLES, LENGTH, VOCAB = 16, 32, 250
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 5e-6, 1e-5
# Muon iterates in bf16 by default. One process that accumulates its samples two at a time is 4e-5 off one that takes
# them at once after 20 steps (with experts, whose few tokens give gradients of low rank, 7e-4): rounding alone.
# Orthogonalizing halves of matrices instead of whole ones is 1e-2 off. With the iteration in fp32 all are within 5e-6.
MUON_LOSS_TOLERANCE, MUON_EXPERTS_LOSS_TOLERANCE = 2e-4, 2e-3
MODEL_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "muP": {"mup_base": 16},
    "balance loss": {},  # see model_config
    "LoRA": {"lora": LoraConfig(rank=4)},
    "MTP": {"mtp_weight": 0.3},
    "windows": {"sliding_window": 8, "full_attention_interval": 2},
    "soft-cap": {"final_logit_softcapping": 10.0, "z_loss": 1e-2},
    "dropout": {"residual_dropout": 0.1},
}
# Its masks depend on the ranks, so that only a gross mistake shows: the loss falls from 5.5 in these steps.
DROPOUT_LOSS_TOLERANCE = 0.2


@dataclass(frozen=True)
class ParityCase:
    """A parallel layout to compare."""

    name: str
    ranks: int
    parallel: ParallelRecipe
    moe: bool = False
    layers: int = 4
    micro_batch_size: int | None = None
    """Samples in a micro-batch; gradients are accumulated over the rest."""

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims.from_recipe(self.parallel, self.ranks)

    @property
    def samples_per_micro_batch(self) -> int:
        """The number that ``ParallelModel`` takes."""
        own = SAMPLES // self.dims.dp
        stages = self.parallel.pp * self.parallel.stages_per_rank
        return self.micro_batch_size or (even_micro_batch_size(own, 2 * stages) if stages > 1 else own)

    @property
    def is_plain(self) -> bool:
        """Whether variants of the model are compared in it: two ranks, or several kinds of parallelism at once. How
        gradients are accumulated and weights gathered does not depend on the model."""
        used = sum(size > 1 for size in (self.dims.dp, self.dims.tp, self.dims.pp, self.dims.cp, self.dims.ep))
        return self.micro_batch_size is None and self.ranks > 1 and (self.ranks == 2 or used > 1)


@dataclass(frozen=True)
class TrainingSetup:
    """How to train: optimizer, model variant, masking, checkpointing."""

    name: str
    optimizer: Literal["adamw", "adafactor", "sgd", "muon"]
    model_variant: str = "plain"
    """A key of ``MODEL_VARIANTS``."""
    document_mask: bool = False
    checkpointing: Literal["none", "full", "selective"] = "none"
    muon_dtype: Literal["bf16", "fp32"] = "bf16"

    def differs_by_design(self, case: ParityCase) -> bool:
        """Whether the layout trains something else on purpose: ranks with different tokens draw different masks."""
        dims = case.dims
        shares = dims.dp * dims.cp * (dims.tp if case.parallel.sp else 1)
        return self.model_variant == "dropout" and shares > 1

    @property
    def depends_on_micro_batches(self) -> bool:
        """Whether one process must take as many samples at a time as the layout."""
        return self.model_variant in ("balance loss", "dropout")

    def loss_tolerance(self, case: ParityCase) -> float:
        if self.differs_by_design(case):
            return DROPOUT_LOSS_TOLERANCE
        if self.optimizer != "muon" or self.muon_dtype == "fp32":
            return LOSS_TOLERANCE
        return MUON_EXPERTS_LOSS_TOLERANCE if case.moe else MUON_LOSS_TOLERANCE

    def supports(self, case: ParityCase) -> bool:
        """Whether a recipe may ask for it, and the comparison says something."""
        if self.model_variant not in ("plain", "tied", "muP") and not case.is_plain:
            return False
        if case.moe and self.model_variant == "LoRA":  # experts have no adapters
            return False
        if not case.moe and self.model_variant == "balance loss":
            return False
        parallel = case.parallel.model_copy(update={"activation_checkpointing": self.checkpointing})
        train = TrainRecipe(steps=1, seq_len=LENGTH, batch_tokens=LENGTH * SAMPLES)
        return not any(parallel_mistakes(self.model_config(case), train, parallel))

    def model_config(self, case: ParityCase) -> ModelConfig:
        """The smallest model that every layout allows: heads for tp 4 with grouped queries, a layer for each stage."""
        moe = None
        if case.moe:
            is_aux = self.model_variant == "balance loss"
            moe = MoeConfig(
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                load_balancing="aux" if is_aux else "bias",
                router_aux_loss_coef=0.1,  # a hundred times what is usual, so that a mistake shows
            )
        return ModelConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=case.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=8,
            max_position_embeddings=LENGTH,
            vocab_size=VOCAB,
            qk_norm=True,
            initializer_range=0.05,
            moe=moe,
            **MODEL_VARIANTS[self.model_variant],
        )

    def optimizer_recipe(self) -> OptimizerRecipe:
        # At higher rates rounding grows: one process that adds up its samples in another order is off after 20 steps by
        # 4e-2 with SGD at 0.3 (4e-7 at 0.03), by 1.5e-4 with Adafactor at 3e-3 and 8 layers (3e-8 at 3e-4), and by 2e-6
        # with AdamW at 3e-3 and 8 layers (8e-8 at 1e-3).
        lr = {"sgd": 0.03, "adamw": 1e-3, "adafactor": 3e-4, "muon": 3e-3}[self.optimizer]
        return OptimizerRecipe(
            name=self.optimizer, lr=lr, muon_lr=0.005, muon_dtype=self.muon_dtype, momentum=0.9, weight_decay=0.01
        )


# Adam divides a gradient by its own size and so hides one of the wrong scale; SGD with momentum does not.
TRAINING_SETUPS = (
    TrainingSetup("AdamW", "adamw"),
    TrainingSetup("SGD", "sgd"),
    TrainingSetup("AdamW, document mask", "adamw", document_mask=True),
    TrainingSetup("SGD, document mask, full checkpointing", "sgd", document_mask=True, checkpointing="full"),
    TrainingSetup("SGD, selective checkpointing", "sgd", checkpointing="selective"),
    TrainingSetup("tied", "sgd", model_variant="tied"),
    TrainingSetup("muP", "adamw", model_variant="muP"),
    TrainingSetup("Adafactor", "adafactor"),
    TrainingSetup("Muon", "muon"),
    TrainingSetup("Muon in fp32", "muon", muon_dtype="fp32"),
    *(
        TrainingSetup(name, "sgd", model_variant=name, document_mask=True)
        for name in ("balance loss", "LoRA", "MTP", "windows", "soft-cap", "dropout")
    ),
)


def _case(name: str, ranks: int, micro_batch_size: int | None = None, *, moe: bool = False, **sizes: Any) -> ParityCase:
    recipe = ParallelRecipe(**sizes)
    return ParityCase(name, ranks, recipe, moe, max(4, recipe.pp * recipe.stages_per_rank), micro_batch_size)


def cases() -> list[ParityCase]:
    """Every layout of the table."""
    schedules = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
    return [
        _case("one process, accumulated", 1, micro_batch_size=2),  # what rounding alone does
        *(_case(f"DDP {n}", n, dp_replicate=n) for n in (2, 4)),
        _case("DDP 2, experts", 2, moe=True, dp_replicate=2),
        *(
            _case(f"FSDP {n}, {kind} reshard", n, reshard_after_forward=kind)
            for n in (2, 4)
            for kind in ("always", "never")
        ),
        _case("FSDP 4, reshard to 2", 4, reshard_after_forward=2),
        *(_case(f"FSDP {n}, experts", n, moe=True) for n in (2, 4)),
        _case("HSDP 2x2", 4, dp_replicate=2),
        *_accumulation_cases(),
        *_zero_cases(),
        *(_case(f"TP {n}", n, tp=n, sp=False) for n in (2, 4)),
        *(_case(f"TP {n} + SP", n, tp=n) for n in (2, 4)),
        *(_case(f"PP {n} {schedule}", n, pp=n, schedule=schedule) for n in (2, 4) for schedule in schedules),
        *(_case(f"CP {n} gather", n, cp=n) for n in (2, 4)),
        *(_case(f"CP {n} ulysses", n, cp=n, cp_attention="ulysses") for n in (2, 4)),
        *(_case(f"CP {n} ring", n, cp=n, cp_attention="ring") for n in (2, 4)),
        *(_case(f"CP 2 {kind}, experts", 2, moe=True, cp=2, cp_attention=kind) for kind in ("ulysses", "ring")),
        *(_case(f"EP {n}", n, moe=True, ep=n) for n in (2, 4)),
        _case("EP 2 x FSDP 2", 4, moe=True, ep=2),
        _case("FSDP 2 x TP 2", 4, tp=2),
        _case("HSDP 2x1 x TP 2", 4, tp=2, dp_replicate=2, dp_shard=1),
        _case("FSDP 2 x PP 2", 4, pp=2),
        _case("FSDP 2 x PP 2 zbv", 4, pp=2, schedule="zbv"),
        _case("HSDP 2x1 x PP 2 zbv", 4, pp=2, schedule="zbv", dp_replicate=2, dp_shard=1),
        _case("TP 2 x PP 2", 4, tp=2, pp=2),
        _case("CP 2 x TP 2", 4, cp=2, tp=2),
        _case("CP 2 ring x TP 2", 4, cp=2, cp_attention="ring", tp=2),
        _case("CP 2 x PP 2 interleaved", 4, cp=2, pp=2, schedule="interleaved"),
        _case("EP 2 x PP 2", 4, moe=True, ep=2, pp=2),
        _case("FSDP 2 x TP 2 x PP 2", 8, tp=2, pp=2),
        _case("FSDP 2 x TP 2 x PP 2 interleaved", 8, tp=2, pp=2, schedule="interleaved"),
        _case("ZeRO-1 x TP 2 x PP 2 interleaved", 8, zero=1, tp=2, pp=2, schedule="interleaved"),
    ]


def select_cases(patterns: Sequence[str] | None) -> list[ParityCase]:
    """Layouts that match any of the patterns, as shells match file names; all of them without patterns."""
    chosen = _match("layout", [case.name for case in cases()], patterns)
    return [case for case in cases() if case.name in chosen]


def select_setups(patterns: Sequence[str] | None) -> list[TrainingSetup]:
    """Setups that match any of the patterns, as in :func:`select_cases`."""
    chosen = _match("setup", [setup.name for setup in TRAINING_SETUPS], patterns)
    return [setup for setup in TRAINING_SETUPS if setup.name in chosen]


def _match(kind: str, names: list[str], patterns: Sequence[str] | None) -> set[str]:
    for pattern in patterns or ():
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"no {kind} matches {pattern!r}; there are {', '.join(names)}")
    return {name for name in names if not patterns or any(fnmatch.fnmatchcase(name, one) for one in patterns)}


def _zero_cases() -> list[ParityCase]:
    """Weights that stay gathered over several micro-batches; a pipeline keeps them with every stage."""
    return [
        *(_case(f"ZeRO-{stage} on 2", 2, micro_batch_size=2, zero=stage) for stage in (1, 2)),
        _case("ZeRO-1, HSDP 2x2", 4, micro_batch_size=1, zero=1, dp_replicate=2),
        _case("ZeRO-1 x TP 2", 4, micro_batch_size=2, zero=1, tp=2),
        _case("ZeRO-1 x PP 2", 4, micro_batch_size=1, zero=1, pp=2),
        _case("ZeRO-1 x PP 2 zbv", 4, micro_batch_size=1, zero=1, pp=2, schedule="zbv"),
        _case("ZeRO-2 x CP 2", 4, micro_batch_size=2, zero=2, cp=2),
        _case("ZeRO-2 x EP 2", 4, micro_batch_size=1, zero=2, moe=True, ep=2),
    ]


def _accumulation_cases() -> list[ParityCase]:
    """Several micro-batches; a pipeline has them in any case."""
    return [
        _case("DDP 2, accumulated", 2, micro_batch_size=2, dp_replicate=2),
        _case("FSDP 2, accumulated", 2, micro_batch_size=1),
        _case("FSDP 4, accumulated, never reshard", 4, micro_batch_size=1, reshard_after_forward="never"),
        _case("HSDP 2x2, accumulated", 4, micro_batch_size=1, dp_replicate=2),
        _case("FSDP 2 x TP 2, accumulated", 4, micro_batch_size=2, tp=2),
        _case("EP 2 x FSDP 2, accumulated", 4, micro_batch_size=1, moe=True, ep=2),
    ]
