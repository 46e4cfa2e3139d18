"""What ``z2a bench parity`` compares with one process: layouts, and ways to train in each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zero2all.recipe import ModelConfig, MoeConfig, OptimizerRecipe, ParallelRecipe

SAMPLES, LENGTH, VOCAB = 16, 32, 250
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 5e-6, 1e-5
# Muon iterates in bf16. One process that accumulates its samples two at a time is 4e-5 off one that takes them at once
# after 20 steps (with experts, whose few tokens give gradients of low rank, 7e-4): rounding alone. Orthogonalising
# halves of matrices instead of whole ones is 1e-2 off.
MUON_LOSS_TOLERANCE, MUON_EXPERTS_LOSS_TOLERANCE = 2e-4, 2e-3


@dataclass(frozen=True)
class Case:
    """A layout to be tried."""

    name: str
    ranks: int
    parallel: ParallelRecipe
    moe: bool = False
    layers: int = 4
    micro_samples: int | None = None
    """Samples in a micro-batch; gradients are accumulated over the rest."""


@dataclass(frozen=True)
class Kind:
    """A way to train."""

    name: str
    optimizer: Literal["adamw", "sgd", "muon"]
    model: Literal["plain", "tied", "muP"] = "plain"
    documents: bool = False
    checkpointing: Literal["none", "full", "selective"] = "none"

    def loss_tolerance(self, case: Case) -> float:
        if self.optimizer != "muon":
            return LOSS_TOLERANCE
        return MUON_EXPERTS_LOSS_TOLERANCE if case.moe else MUON_LOSS_TOLERANCE

    def suits(self, case: Case) -> bool:
        return not (self.model == "tied" and case.parallel.pp > 1)  # refused: embedding and head are on different ranks

    def config(self, case: Case) -> ModelConfig:
        """As small as every layout allows: heads for tp 4 with grouped queries, a layer for each stage."""
        moe = MoeConfig(experts=8, top_k=2, expert_intermediate=32, balance="bias") if case.moe else None
        return ModelConfig(
            hidden_size=32,
            intermediate_size=64,
            n_layers=case.layers,
            n_heads=8,
            n_kv_heads=4,
            head_dim=8,
            context=LENGTH,
            vocab_size=VOCAB,
            qk_norm=True,
            init_std=0.05,
            moe=moe,
            tied=self.model == "tied",
            mup_base=16 if self.model == "muP" else None,
        )

    def recipe(self) -> OptimizerRecipe:
        # SGD at 0.3 is chaotic here: one process that adds up its samples in another order is 4e-2 off after 20 steps.
        # At 0.03 it learns as fast and stays within 4e-7.
        lr = 0.03 if self.optimizer == "sgd" else 3e-3
        return OptimizerRecipe(name=self.optimizer, lr=lr, muon_lr=0.005, momentum=0.9, weight_decay=0.01)


# Adam divides a gradient by its own size and so hides one of the wrong scale; SGD with momentum does not.
KINDS = (
    Kind("AdamW", "adamw"),
    Kind("SGD", "sgd"),
    Kind("AdamW, document mask", "adamw", documents=True),
    Kind("SGD, document mask, full checkpointing", "sgd", documents=True, checkpointing="full"),
    Kind("SGD, selective checkpointing", "sgd", checkpointing="selective"),
    Kind("tied", "sgd", model="tied"),
    Kind("muP", "adamw", model="muP"),
    Kind("Muon", "muon"),
)


def kind(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def _case(name: str, ranks: int, micro_samples: int | None = None, moe: bool = False, **sizes: Any) -> Case:
    recipe = ParallelRecipe(**sizes)
    return Case(name, ranks, recipe, moe, max(4, recipe.pp * recipe.stages_per_rank), micro_samples)


def cases() -> list[Case]:
    """Every layout of the table."""
    schedules = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
    return [
        _case("one process, accumulated", 1, micro_samples=2),  # what rounding alone does
        *(_case(f"DDP {n}", n, dp_replicate=n) for n in (2, 4)),
        _case("DDP 2, experts", 2, moe=True, dp_replicate=2),
        *(_case(f"FSDP {n}, {kind} reshard", n, reshard=kind) for n in (2, 4) for kind in ("always", "never")),
        _case("FSDP 4, reshard to 2", 4, reshard=2),
        *(_case(f"FSDP {n}, experts", n, moe=True) for n in (2, 4)),
        _case("HSDP 2x2", 4, dp_replicate=2),
        *_accumulated(),
        *(_case(f"TP {n}", n, tp=n, sp=False, loss_parallel=False) for n in (2, 4)),
        *(_case(f"TP {n} + SP", n, tp=n, loss_parallel=False) for n in (2, 4)),
        *(_case(f"TP {n} + SP, parallel loss", n, tp=n) for n in (2, 4)),
        _case("TP 2, parallel loss", 2, tp=2, sp=False),
        *(_case(f"PP {n} {schedule}", n, pp=n, schedule=schedule) for n in (2, 4) for schedule in schedules),
        *(_case(f"CP {n} gather", n, cp=n) for n in (2, 4)),
        *(_case(f"CP {n} ulysses", n, cp=n, cp_attention="ulysses") for n in (2, 4)),
        *(_case(f"EP {n}", n, moe=True, ep=n) for n in (2, 4)),
        _case("EP 2 x FSDP 2", 4, moe=True, ep=2),
        _case("FSDP 2 x TP 2", 4, tp=2),
        _case("HSDP 2x1 x TP 2", 4, tp=2, dp_replicate=2, dp_shard=1),
        _case("FSDP 2 x PP 2", 4, pp=2),
        _case("FSDP 2 x PP 2 zbv", 4, pp=2, schedule="zbv"),
        _case("HSDP 2x1 x PP 2 zbv", 4, pp=2, schedule="zbv", dp_replicate=2, dp_shard=1),
        _case("TP 2 x PP 2", 4, tp=2, pp=2),
        _case("CP 2 x TP 2", 4, cp=2, tp=2),
        _case("CP 2 x PP 2 interleaved", 4, cp=2, pp=2, schedule="interleaved"),
        _case("EP 2 x PP 2", 4, moe=True, ep=2, pp=2),
        _case("FSDP 2 x TP 2 x PP 2", 8, tp=2, pp=2),
        _case("FSDP 2 x TP 2 x PP 2 interleaved", 8, tp=2, pp=2, schedule="interleaved"),
    ]


def _accumulated() -> list[Case]:
    """Several micro-batches; a pipeline has them in any case."""
    return [
        _case("DDP 2, accumulated", 2, micro_samples=2, dp_replicate=2),
        _case("FSDP 2, accumulated", 2, micro_samples=1),
        _case("FSDP 4, accumulated, never reshard", 4, micro_samples=1, reshard="never"),
        _case("HSDP 2x2, accumulated", 4, micro_samples=1, dp_replicate=2),
        _case("FSDP 2 x TP 2, accumulated", 4, micro_samples=2, tp=2),
        _case("EP 2 x FSDP 2, accumulated", 4, micro_samples=1, moe=True, ep=2),
        *(
            _case(f"{name}, reduced with the last", 4, micro_samples=1, gradient_sync="last", **sizes)
            for name, sizes in (
                ("FSDP 4, accumulated", {}),
                ("HSDP 2x2, accumulated", {"dp_replicate": 2}),
                ("FSDP 2 x PP 2", {"pp": 2}),
                ("FSDP 2 x PP 2 zbv", {"pp": 2, "schedule": "zbv"}),
            )
        ),
    ]
