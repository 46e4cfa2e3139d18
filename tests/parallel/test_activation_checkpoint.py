"""Activation checkpointing: what is kept, what is recomputed, and that nothing else changes."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from zero2all.model import ModelInputs, document_starts
from zero2all.model.cost.flops import flops_per_token
from zero2all.model.moe import MoE
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "vocab_size": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 5.0}
MODES = ("none", "selective", "full")


def build_model(
    mode: str, moe: dict[str, Any] | None, sizes: dict[str, Any] | None = None, **changes: Any
) -> ParallelModel:
    config = ModelConfig.model_validate({**SHAPE, "moe": moe, **changes})
    recipe = ParallelRecipe.model_validate({"activation_checkpointing": mode, **(sizes or {})})
    return ParallelModel(config, recipe, ParallelMesh.init_distributed(recipe, torch.device("cpu")), seed=0)


def step(parallel_model: ParallelModel, masked: bool = True) -> Tensor:
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    first, last = parallel_model.mesh.sample_range(4)
    inputs, targets = tokens[first:last, :-1], tokens[first:last, 1:]
    starts = document_starts(inputs == 7) if masked else None
    return parallel_model.forward_backward(ModelInputs(inputs, targets, doc_starts_BS=starts), divisor=128)


def gradients(parallel_model: ParallelModel) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in parallel_model.model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def loads(parallel_model: ParallelModel) -> list[list[float]]:
    return [module.load.tolist() for module in parallel_model.model.modules() if isinstance(module, MoE)]


class Storages(TorchDispatchMode):
    """All memory that operations allocated, also what only the autograd graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):  # its local tensor is counted
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive(self, but: list[Tensor]) -> int:
        """Bytes that are still allocated."""
        gc.collect()
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in but]
        known = {StorageWeakRef(tensor.untyped_storage()) for tensor in local}
        return sum(size for storage, size in self.made.items() if storage not in known and not storage.expired())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{}, {"mtp_weight": 0.3}], ids=str)
def test_nothing_of_the_graph_survives_backward(mode: str, changes: dict[str, Any]) -> None:
    parallel_model = build_model(mode, MOE, **changes)
    with Storages() as storages:
        step(parallel_model)
    kept = [*parallel_model.model.parameters(), *parallel_model.model.buffers()]
    kept += [parameter.grad for parameter in parallel_model.model.parameters() if parameter.grad is not None]
    assert storages.alive(but=kept) == 0


@pytest.mark.parametrize("moe", [None, MOE, {**MOE, "load_balancing": "bias"}], ids=["dense", "aux", "bias"])
def test_checkpointing_changes_no_loss_no_gradient_and_no_load(moe: dict[str, Any] | None) -> None:
    found = {}
    for mode in MODES:
        parallel_model = build_model(mode, moe)
        found[mode] = [
            step(parallel_model),
            *gradients(parallel_model).values(),
            *map(torch.tensor, loads(parallel_model)),
        ]
    for mode in MODES[1:]:
        for one, other in zip(found[mode], found["none"], strict=True):
            torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6)
    if moe is not None:
        assert all(load.sum() == 128 * 2 for load in found["none"][-3:]), "two experts for each token, counted once"


DROPOUT = {"attention_dropout": 0.2, "residual_dropout": 0.3}


@pytest.mark.parametrize(
    ("changes", "moe"), [({}, None), (DROPOUT, None), (DROPOUT, MOE)], ids=["plain", "dropout", "experts"]
)
@pytest.mark.parametrize(("mode", "every"), [("selective", 1), ("full", 1), ("full", 2), ("full", 3), ("full", 8)])
def test_groups_of_blocks_give_the_same_bits(
    mode: str, every: int, changes: dict[str, Any], moe: dict[str, Any] | None
) -> None:
    found = []
    for sizes in ({"activation_checkpointing_every": every}, {"activation_checkpointing": "none"}):
        parallel_model = build_model(mode, moe, sizes, **changes)
        found.append({"loss": step(parallel_model, masked=not changes), **gradients(parallel_model)})
    for name, value in found[1].items():
        assert torch.equal(found[0][name], value), name


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
