"""``train.compile``: whether blocks are compiled, tried out on one block before the model is built."""

from __future__ import annotations

from typing import Any

import torch

from zero2all.base.console import say, warn
from zero2all.base.machine.devices import wants_compile
from zero2all.checkpoint import RankGroup
from zero2all.model import Z2all
from zero2all.parallel.activation_checkpoint import apply_ac
from zero2all.parallel.float8 import apply_float8
from zero2all.recipe import ModelConfig, ParallelRecipe, Recipe
from zero2all.recipe.parallel import SPLIT_BACKWARD_SCHEDULES
from zero2all.recipe.training import Float8Scaling

PROBE_TOKENS = 256
PROBE_VOCABULARY = 64
PROBE_EXPERTS = 4
REASON_LINES = 2  # of a compiler's error: what raised it, and what was wrong


def choose_compile(
    recipe: Recipe, config: ModelConfig, device: torch.device, dtype: torch.dtype, ranks: RankGroup
) -> bool:
    """The same on every rank. ``auto`` falls back to eager, and says why; ``true`` is taken at its word."""
    parallel = recipe.parallel
    if recipe.train.compile != "auto":
        return recipe.train.compile
    if parallel.activation_checkpointing == "budget":  # only the compiler can keep it
        return True
    if not wants_compile(recipe.train.compile, device):
        return False
    if parallel.activation_offload:
        say("blocks are not compiled: parallel.activation_offload sees what eager operations save, not compiled ones")
        return False
    if parallel.pp > 1 and parallel.schedule in SPLIT_BACKWARD_SCHEDULES:
        say(f"blocks are not compiled: schedule {parallel.schedule} cannot split a compiled backward")
        return False

    def failures() -> list[tuple[int, str]]:
        failure = compile_failure(config, parallel, device, dtype, recipe.train.float8)
        return [] if failure is None else [(ranks.rank, failure)]

    if not (failed := ranks.reduce(failures, lambda one, other: sorted(one + other)[:1])):
        return True
    [(rank, failure)] = failed
    warn(
        f"blocks are not compiled, so training is slower: on rank {rank} torch.compile failed on one "
        f"({failure}); set train.compile=false to skip the attempt, or train.compile=true for the full error"
    )
    return False


def compile_failure(
    config: ModelConfig,
    parallel: ParallelRecipe,
    device: torch.device,
    dtype: torch.dtype,
    float8: Float8Scaling | None = None,
) -> str | None:
    """Why a block of this model cannot be compiled on this device; None if forward and backward have run.

    The block is this rank's own, so that a failure leaves no other rank in a collective.
    """
    try:
        _run_compiled_block(config, parallel, device, dtype, float8)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines[:REASON_LINES])}"
    finally:
        # Else the compiler would take the first training batch for a change of shape, and compile for any shape.
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def _run_compiled_block(
    config: ModelConfig,
    parallel: ParallelRecipe,
    device: torch.device,
    dtype: torch.dtype,
    float8: Float8Scaling | None,
) -> None:
    small: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": PROBE_VOCABULARY, "mtp_weight": 0.0}
    if config.moe is not None:
        # A few experts: all of a layer, with their gradients, may not fit into one GPU.
        few = min(config.moe.num_experts, max(config.moe.num_experts_per_tok, PROBE_EXPERTS))
        small["moe"] = config.moe.model_copy(update={"first_k_dense_replace": 0, "num_experts": few})
    with torch.device(device):
        model = Z2all(config.model_copy(update=small)).init_weights(0)
    if float8 is not None:
        apply_float8(model.layers, float8, device)
    apply_ac(model, parallel, config, device)
    model.layers[0].compile()
    length = min(PROBE_TOKENS, config.max_position_embeddings)
    tokens = torch.arange(length, device=device)[None] % PROBE_VOCABULARY
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        losses = model(tokens, targets_BS=tokens)
    losses.sum().backward()
