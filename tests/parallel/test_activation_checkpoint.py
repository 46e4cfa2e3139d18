"""Activation checkpointing: what is kept, what is recomputed, and that nothing else changes."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.parallel.helpers import BIAS_MOE, MOE, SHAPE, Storages, build_model, gradients, step
from zero2all.model.cost.flops import flops_per_token
from zero2all.model.moe import MoE
from zero2all.recipe import ParallelRecipe

MODES = ("none", "selective", "full")
DROPOUT = {"attention_dropout": 0.2, "residual_dropout": 0.3}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{}, {"mtp_weight": 0.3}], ids=str)
def test_nothing_of_the_graph_survives_backward(mode: str, changes: dict[str, Any]) -> None:
    parallel_model = build_model(mode, MOE, **changes)
    with Storages() as storages:
        step(parallel_model)
    assert storages.alive(parallel_model.model) == 0


@pytest.mark.parametrize(
    ("changes", "moe"),
    [({}, None), ({}, MOE), ({}, BIAS_MOE), (DROPOUT, None), (DROPOUT, MOE)],
    ids=["plain", "aux", "bias", "dropout", "dropout, aux"],
)
def test_checkpointing_changes_no_bit_of_losses_gradients_and_loads(
    changes: dict[str, Any], moe: dict[str, Any] | None
) -> None:
    """Also in groups of blocks."""

    def found(mode: str, every: int = 1) -> dict[str, Tensor]:
        model = build_model(mode, moe, {"activation_checkpointing_every": every}, **changes)
        values = {"loss": step(model, masked=not changes), **gradients(model)}
        loads = [module.load for module in model.model.modules() if isinstance(module, MoE)]
        return {**values, **{f"load {number}": load for number, load in enumerate(loads)}}

    expected = found("none")
    for mode, every in (("selective", 1), ("full", 1), ("full", 2), ("full", 3), ("full", 8)):
        values = found(mode, every)
        assert values.keys() == expected.keys()
        assert [name for name in values if not torch.equal(values[name], expected[name])] == [], (mode, every)
    if moe is not None:
        assert all(expected[f"load {n}"].sum() == 128 * 2 for n in range(3)), "two experts for each token, counted once"


def inputs_of_blocks(every: int, layers: int) -> tuple[list[int], list[int]]:
    """The blocks whose input is alive after the forward pass, and all blocks in the order of their forward passes."""
    parallel_model = build_model("full", None, {"activation_checkpointing_every": every}, num_hidden_layers=layers)
    inputs: dict[int, StorageWeakRef] = {}
    order: list[int] = []

    def remember(block: nn.Module, args: tuple[Any, ...]) -> None:
        layer = block.self_attn.layer
        inputs.setdefault(layer, StorageWeakRef(args[0].untyped_storage()))
        order.append(layer)

    for block in parallel_model.model.layers:
        block.register_forward_pre_hook(remember)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    losses = parallel_model.model(tokens, targets_BS=tokens)
    gc.collect()
    alive = [layer for layer, storage in inputs.items() if not storage.expired()]
    losses.sum().backward()
    return alive, order


@pytest.mark.parametrize(("every", "kept"), [(2, [0, 2, 4]), (3, [0, 3]), (4, [0, 4]), (8, [0])])
def test_one_input_is_kept_per_group_and_the_group_is_recomputed(every: int, kept: list[int]) -> None:
    alive, order = inputs_of_blocks(every, layers=5)
    assert alive == kept
    assert order[:5] == [0, 1, 2, 3, 4]
    ends = [*kept[1:], 5]
    recomputed = [list(range(first, end)) for first, end in zip(kept, ends, strict=True)]
    assert order[5:] == [layer for group in reversed(recomputed) for layer in group], "the last group first, each once"


def peak_bytes(every: int, layers: int) -> int:
    """Bytes of tensors that autograd holds at the worst moment of forward and backward."""
    parallel_model = build_model("full", None, {"activation_checkpointing_every": every}, num_hidden_layers=layers)
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    live: dict[int, int] = {}
    peak = 0

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal peak
            self.tensor = tensor
            live[id(self)] = tensor.untyped_storage().nbytes()
            peak = max(peak, sum(live.values()))

        def __del__(self) -> None:
            live.pop(id(self), None)

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        parallel_model.model(tokens, targets_BS=tokens).sum().backward()
    return peak


def test_a_larger_group_keeps_fewer_inputs() -> None:
    """Hooks outside of a checkpoint see its inputs alone: those of groups, head and embedding."""
    peaks = [peak_bytes(every, layers=8) for every in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    stream = 8 * 32 * SHAPE["hidden_size"] * 4
    assert peaks[0] - peaks[1] == pytest.approx(4 * stream, rel=0.3)


def test_groups_are_for_full_checkpointing() -> None:
    for mode in ("none", "selective", "budget"):
        with pytest.raises(ValueError, match="set activation_checkpointing=full, or activation_checkpointing_every=1"):
            ParallelRecipe(activation_checkpointing=mode, activation_checkpointing_every=2)
    with pytest.raises(ValueError, match="the inputs of groups of blocks are not offloaded"):
        ParallelRecipe(activation_checkpointing="full", activation_checkpointing_every=2, activation_offload=True)


def test_the_balance_loss_is_in_the_gradient_with_checkpointing_too() -> None:
    """Or equal gradients would only mean that every mode had lost it."""
    routers = []
    for weight in (0.0, 5.0):
        parallel_model = build_model("full", {**MOE, "router_aux_loss_coef": weight})
        step(parallel_model)
        routers.append(gradients(parallel_model)["layers.0.mlp.gate.weight"])
    assert (routers[1] - routers[0]).abs().max() > 1e-4


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[str(op)] += 1
        return op(*args, **(kwargs or {}))


PRODUCTS = {
    "aten.mm.default",
    "aten.bmm.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "zero2all.document_attention.default",
    "zero2all.expert_product.default",
}


@pytest.mark.parametrize("masked", [True, False], ids=["documents", "causal"])
@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "experts"])
def test_selective_runs_every_product_once(moe: dict[str, Any] | None, masked: bool) -> None:
    calls = {}
    for mode in MODES:
        parallel_model = build_model(mode, moe)
        with Calls() as counted:
            step(parallel_model, masked)
        calls[mode] = {op: count for op, count in counted.of.items() if op in PRODUCTS}
        calls[mode]["cheap"] = counted.of["aten.silu.default"]
    attention = "zero2all.document" if masked else "aten._scaled_dot"
    assert sum(count for op, count in calls["none"].items() if op.startswith(attention)) == 3, "one for each layer"
    assert ("zero2all.expert_product.default" in calls["none"]) is (moe is not None)
    assert calls["selective"].pop("cheap") == calls["full"]["cheap"] == 2 * calls["none"].pop("cheap")
    assert calls["selective"] == calls["none"]
    assert sum(calls["full"].values()) > sum(calls["none"].values()) + 3


def test_operations_of_packages_are_known_by_name() -> None:
    """Those of a GPU cannot run here; what they are called can be checked where they are defined."""
    from torch.nn.attention import varlen  # noqa: F401 - which registers its operation

    from zero2all.parallel.activation_checkpoint import is_saved

    ops = torch.ops
    forward = (ops.aten._grouped_mm, ops._c10d_functional.all_to_all_single, ops.torch_attn._varlen_attn)
    assert all(is_saved(op.default) for op in forward)
    assert not is_saved(ops.aten.silu.default)
    library = torch.library.Library("flash_attn", "FRAGMENT")
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward"):
        if not hasattr(ops.flash_attn, name):
            library.define(f"{name}(Tensor q) -> Tensor")
        assert is_saved(getattr(ops.flash_attn, name).default)


@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "experts"])
def test_hardware_flops_are_those_that_torch_counts(moe: dict[str, Any] | None) -> None:
    for mode, every in (*((mode, 1) for mode in MODES), ("full", 2), ("full", 3)):
        sizes = {"activation_checkpointing_every": every}
        parallel_model = build_model(mode, moe, sizes, ops={"cross_entropy": "reference"})
        with FlopCounterMode(display=False) as counter:
            step(parallel_model)
        flops = flops_per_token(parallel_model.config, 32).hardware(mode, every=every)
        assert flops * 128 == pytest.approx(counter.get_total_flops(), rel=0.01), (mode, every)
