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

from tests.ranks import on_ranks
from zero2all.model import document_starts
from zero2all.model.cost.flops import flops_per_token
from zero2all.model.moe import MoE
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.parallel.activation_checkpoint import apply_ac
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
    return parallel_model.forward_backward(inputs, targets, 128, starts)


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
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("mode", MODES[1:])
def test_every_nth_block_gives_the_same_bits(
    mode: str, every: int, changes: dict[str, Any], moe: dict[str, Any] | None
) -> None:
    found = []
    for sizes in ({"activation_checkpointing_every": every}, {"activation_checkpointing": "none"}):
        parallel_model = build_model(mode, moe, sizes, **changes)
        found.append({"loss": step(parallel_model, masked=not changes), **gradients(parallel_model)})
    for name, value in found[1].items():
        assert torch.equal(found[0][name], value), name


def test_every_counts_layers_of_the_full_model() -> None:
    """So that stages of a pipeline checkpoint the blocks that one process would."""
    parallel_model = build_model("full", None, {"activation_checkpointing_every": 2}, num_hidden_layers=5)
    names = [name for name, block in parallel_model.model.layers.named_children() if "forward" in vars(block)]
    assert names == ["0", "2", "4"]
    blocks = nn.ModuleDict({"3": nn.Identity(), "4": nn.Identity()})  # of a stage
    recipe = ParallelRecipe(activation_checkpointing="full", activation_checkpointing_every=2)
    apply_ac(blocks, recipe, parallel_model.config, torch.device("cpu"))
    assert [name for name, block in blocks.items() if "forward" in vars(block)] == ["4"]
    with pytest.raises(ValueError, match="set activation_checkpointing=full or selective"):
        ParallelRecipe(activation_checkpointing_every=2)


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
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch._higher_order_ops.wrap import inductor_compiled_code
    from torch.nn.attention import varlen  # noqa: F401 - which registers its operation

    from zero2all.parallel.selective_checkpoint import is_saved

    ops = torch.ops
    forward = (ops.aten._grouped_mm, ops._c10d_functional.all_to_all_single, ops.torch_attn._varlen_attn)
    assert all(is_saved(op.default) for op in forward)
    assert all(is_saved(op) for op in (flex_attention, inductor_compiled_code))
    assert not is_saved(ops.aten.silu.default)
    library = torch.library.Library("flash_attn", "FRAGMENT")
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward"):
        if not hasattr(ops.flash_attn, name):
            library.define(f"{name}(Tensor q) -> Tensor")
        assert is_saved(getattr(ops.flash_attn, name).default)


@pytest.mark.parametrize("moe", [None, MOE], ids=["dense", "experts"])
def test_hardware_flops_are_those_that_torch_counts(moe: dict[str, Any] | None) -> None:
    for mode, every in (*((mode, 1) for mode in MODES), ("full", 2), ("full", 3), ("selective", 2)):
        sizes = {"activation_checkpointing_every": every}
        parallel_model = build_model(mode, moe, sizes, ops={"cross_entropy": "reference"})
        with FlopCounterMode(display=False) as counter:
            step(parallel_model)
        flops = flops_per_token(parallel_model.config, 32).hardware(mode, every=every)
        assert flops * 128 == pytest.approx(counter.get_total_flops(), rel=0.01), (mode, every)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "tp": ({"tp": 2}, None),
    "ep": ({"ep": 2}, MOE),
    "pipeline": ({"pp": 2}, {**MOE, "load_balancing": "bias"}),
}


def on_every_layout() -> dict[tuple[str, str], tuple[float, dict[str, Tensor], list[list[float]]]]:
    found = {}
    for name, (sizes, moe) in LAYOUTS.items():
        for mode in MODES:
            parallel_model = build_model(mode, moe, sizes)
            total = float(parallel_model.all_reduce_sum(step(parallel_model).sum()))
            found[name, mode] = total, gradients(parallel_model), loads(parallel_model)
    return found


@pytest.mark.long
def test_checkpointing_changes_nothing_on_ranks_either() -> None:
    ranks = on_ranks(2, on_every_layout)
    for found in ranks:
        for name in LAYOUTS:
            plain_loss, plain, plain_load = found[name, "none"]
            for mode in MODES[1:]:
                loss, gradient, load = found[name, mode]
                assert loss == pytest.approx(plain_loss, rel=1e-6)
                assert load == plain_load
                assert gradient.keys() == plain.keys()
                for parameter, value in plain.items():
                    torch.testing.assert_close(gradient[parameter], value, atol=1e-6, rtol=1e-5)
    for name in LAYOUTS.keys() - {"tp"}:
        counted = sum(sum(map(sum, found[name, "full"][2])) for found in ranks)
        assert counted == 3 * 128 * 2, "layers, tokens, experts of a token, whichever rank has them"
