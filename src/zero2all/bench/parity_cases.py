"""What ``z2a bench parity`` compares with one process: parallel layouts, and training setups for each."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zero2all.errors import UsageError
from zero2all.recipe import ModelConfig, MoeConfig, OptimizerRecipe, ParallelRecipe
from zero2all.recipe.parallel import SPLIT_BACKWARD_SCHEDULES

SAMPLES, LENGTH, VOCAB = 16, 32, 250
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 5e-6, 1e-5
# Muon iterates in bf16 by default. One process that accumulates its samples two at a time is 4e-5 off one that takes
# them at once after 20 steps (with experts, whose few tokens give gradients of low rank, 7e-4): rounding alone.
# Orthogonalizing halves of matrices instead of whole ones is 1e-2 off. With the iteration in fp32 all are within 5e-6.
MUON_LOSS_TOLERANCE, MUON_EXPERTS_LOSS_TOLERANCE = 2e-4, 2e-3


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


@dataclass(frozen=True)
class TrainingSetup:
    """How to train: optimizer, model variant, masking, checkpointing."""

    name: str
    optimizer: Literal["adamw", "adafactor", "sgd", "muon"]
    model_variant: Literal["plain", "tied", "muP"] = "plain"
    document_mask: bool = False
    checkpointing: Literal["none", "full", "selective"] = "none"
    muon_dtype: Literal["bf16", "fp32"] = "bf16"

    def loss_tolerance(self, case: ParityCase) -> float:
        if self.optimizer != "muon" or self.muon_dtype == "fp32":
            return LOSS_TOLERANCE
        return MUON_EXPERTS_LOSS_TOLERANCE if case.moe else MUON_LOSS_TOLERANCE

    def supports(self, case: ParityCase) -> bool:
        """Whether a recipe may ask for it: see ``recipe.parallel``."""
        pipeline = case.parallel.pp > 1
        if self.checkpointing == "selective" and pipeline and case.parallel.schedule in SPLIT_BACKWARD_SCHEDULES:
            return False
        return not (self.model_variant == "tied" and pipeline)

    def model_config(self, case: ParityCase) -> ModelConfig:
        """As small as every layout allows: heads for tp 4 with grouped queries, a layer for each stage."""
        moe = (
            MoeConfig(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, load_balancing="bias")
            if case.moe
            else None
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
            tie_word_embeddings=self.model_variant == "tied",
            mup_base=16 if self.model_variant == "muP" else None,
        )

    def optimizer_recipe(self) -> OptimizerRecipe:
        # SGD at 0.3 is chaotic here: one process that adds up its samples in another order is 4e-2 off after 20 steps.
        # At 0.03 it learns as fast and stays within 4e-7.
        lr = 0.03 if self.optimizer == "sgd" else 3e-3
        return OptimizerRecipe(
            name=self.optimizer,
            lr=lr,
            muon_lr=0.005,
            muon_dtype=self.muon_dtype,
            momentum=0.9,
            weight_decay=0.01,
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
)


def training_setup(name: str) -> TrainingSetup:
    return next(setup for setup in TRAINING_SETUPS if setup.name == name)


def _case(name: str, ranks: int, micro_batch_size: int | None = None, moe: bool = False, **sizes: Any) -> ParityCase:
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
        *(_case(f"TP {n}", n, tp=n, sp=False, loss_parallel=False) for n in (2, 4)),
        *(_case(f"TP {n} + SP", n, tp=n, loss_parallel=False) for n in (2, 4)),
        *(_case(f"TP {n} + SP, parallel loss", n, tp=n) for n in (2, 4)),
        _case("TP 2, parallel loss", 2, tp=2, sp=False),
        *(_case(f"PP {n} {schedule}", n, pp=n, schedule=schedule) for n in (2, 4) for schedule in schedules),
        *(_case(f"CP {n} gather", n, cp=n) for n in (2, 4)),
        *(_case(f"CP {n} ulysses", n, cp=n, cp_attention="ulysses") for n in (2, 4)),
        *(_case(f"CP {n} ring", n, cp=n, cp_attention="ring") for n in (2, 4)),
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
    table = cases()
    names = [case.name for case in table]
    for pattern in patterns or ():
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"no layout matches {pattern!r}; there are {', '.join(names)}")
    return [case for case in table if not patterns or any(fnmatch.fnmatchcase(case.name, p) for p in patterns)]


def _zero_cases() -> list[ParityCase]:
    """Weights that stay gathered over several micro-batches; a pipeline keeps them with every stage."""
    return [
        *(_case(f"ZeRO-{stage} on 2", 2, micro_batch_size=2, zero=stage) for stage in (1, 2)),
        _case("ZeRO-1, HSDP 2x2", 4, micro_batch_size=1, zero=1, dp_replicate=2),
        _case("ZeRO-1 x TP 2", 4, micro_batch_size=2, zero=1, tp=2),
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
        *(
            _case(f"{name}, reduced with the last", 4, micro_batch_size=1, gradient_sync="last", **sizes)
            for name, sizes in (
                ("FSDP 4, accumulated", {}),
                ("HSDP 2x2, accumulated", {"dp_replicate": 2}),
                ("FSDP 2 x PP 2", {"pp": 2}),
                ("FSDP 2 x PP 2 zbv", {"pp": 2, "schedule": "zbv"}),
            )
        ),
    ]
