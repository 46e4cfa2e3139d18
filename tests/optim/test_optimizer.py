from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from zero2all.bench.rank_harness import run_ranks
from zero2all.model import ModelInputs, Z2all
from zero2all.optim import muon as muon_module
from zero2all.optim.lion import Lion
from zero2all.optim.muon import Muon, newton_schulz
from zero2all.optim.optimizer import build_optimizers, set_learning_rate
from zero2all.parallel import ParallelDims, ParallelMesh
from zero2all.parallel.parallel_model import ParallelModel
from zero2all.recipe import ModelConfig, MoeConfig, OptimizerRecipe, ParallelRecipe


@pytest.mark.parametrize("name", ["adamw", "adamw-bf16", "adafactor", "muon", "lion", "sgd"])
def test_only_matrices_decay_and_every_parameter_is_in_one_group(name: str) -> None:
    model = Z2all(ModelConfig(vocab_size=64, qkv_bias=True, qk_norm=True))
    optimizers = build_optimizers(model, OptimizerRecipe(name=name, weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    updated = [(names[id(p)], g["weight_decay"]) for o in optimizers for g in o.param_groups for p in g["params"]]
    assert sorted(n for n, _ in updated) == sorted(names.values())
    for parameter, decay in updated:
        assert decay == (0.0 if parameter.endswith(("norm.weight", "bias")) else 0.3)
    if name == "muon":
        by_muon = [names[id(p)] for p in optimizers[1].param_groups[0]["params"]]
        assert len(by_muon) == 7 * 7
        assert all(n.startswith("layers.") and n.endswith("proj.weight") for n in by_muon)


@pytest.mark.parametrize("name", ["adamw", "adamw-bf16", "adafactor", "muon", "lion", "sgd"])
def test_the_recipe_reaches_every_group(name: str) -> None:
    model = Z2all(ModelConfig(vocab_size=64))
    recipe = OptimizerRecipe(name=name, lr=0.5, muon_lr=0.25, momentum=0.7, betas=(0.6, 0.8), eps=1e-5)
    optimizers = build_optimizers(model, recipe)
    set_learning_rate(optimizers, recipe, lr_multiplier=0.5)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            assert group["lr"] == (0.125 if isinstance(optimizer, Muon) else 0.25)
            if not isinstance(optimizer, Muon):
                assert group.get("betas", recipe.betas) == (0.6, 0.8)
                assert group.get("eps", recipe.eps) == 1e-5
            assert group.get("momentum", recipe.momentum) == 0.7


MOE = MoeConfig(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, load_balancing="bias"
)


def test_muon_updates_experts_and_adamw_the_router() -> None:
    model = Z2all(
        ModelConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=64, qkv_bias=True, moe=MOE)
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    adamw, muon = build_optimizers(model, OptimizerRecipe(name="muon"))
    by_muon, by_adamw = ([names[id(p)] for g in o.param_groups for p in g["params"]] for o in (muon, adamw))
    assert isinstance(muon, Muon)
    assert any("mlp.experts.up_proj" in name for name in by_muon)
    assert any("shared_experts.up_proj.weight" in name for name in by_muon)
    assert all("_proj" in name and name.startswith("layers.") for name in by_muon)
    assert any(name.endswith("mlp.gate.weight") for name in by_adamw)
    assert all("gate.weight" in n or "norm" in n or "bias" in n for n in by_adamw if n.startswith("layers."))


@pytest.mark.parametrize(("rows", "columns"), [(24, 32), (32, 24), (16, 16)])
def test_muon_updates_matrices_as_torch_does_and_experts_one_by_one(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(4, rows, columns))
    single = torch.nn.Parameter(stack[0].detach().clone())
    each = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    ours, theirs = Muon([stack, single], **settings), torch.optim.Muon(each, **settings)
    for step in range(3):
        stack.grad = torch.randn(4, rows, columns)
        if step < 2:
            stack.grad[2] = 0  # an expert without tokens only decays
        single.grad = stack.grad[0].clone()
        for matrix, gradient in zip(each, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        for optimizer in (ours, theirs):
            optimizer.step()
        for expert, matrix in enumerate(each):
            torch.testing.assert_close(stack[expert], matrix, rtol=0, atol=2e-3)  # bf16 products of another shape
        assert torch.equal(single, each[0])
    assert (stack[2] - each[2]).abs().max() < 2e-3


def test_newton_schulz_brings_the_singular_values_of_every_expert_near_1() -> None:
    torch.manual_seed(0)
    scales = torch.tensor([1e-3, 1.0, 1e3])[:, None, None]  # a norm over the stack would leave the small ones small
    values = torch.linalg.svdvals(newton_schulz(torch.randn(3, 24, 32) * scales).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


@dataclass(frozen=True)
class MuonOnMesh:
    error: float
    """Largest difference of two steps on shards from two on full tensors, as a fraction of the learning rate."""
    collectives: float
    """In a step, for each parameter group and mesh dimension."""
    share: float
    """Elements that this rank orthogonalized, as a fraction of those of the model."""


def _compare_with_full_matrices(sizes: dict[str, int], moe: bool, dtype: Literal["bf16", "fp32"]) -> MuonOnMesh:
    intermediate = 52 if sizes.get("tp") == 4 else 50  # which leaves uneven shards
    config = ModelConfig(
        hidden_size=32, intermediate_size=intermediate,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16, vocab_size=64,
        moe=MOE if moe else None,
    )  # fmt: skip
    parallel, recipe = ParallelRecipe(**sizes), OptimizerRecipe(name="muon", muon_lr=0.01, muon_dtype=dtype)
    mesh = ParallelMesh(ParallelDims.from_recipe(parallel, 4), torch.device("cpu"))
    parallel_model = ParallelModel(config, parallel, mesh, seed=0)
    build = functools.partial(build_optimizers, parallel_model.model, recipe, parallel_model.param_groups)
    muon = build(replicas=parallel_model.ddp_group)[1]
    ours = [parameter for group in muon.param_groups for parameter in group["params"]]
    assert sum(parameter.dim() == 3 for parameter in ours) == (3 if moe else 0)
    theirs = [torch.nn.Parameter(full(parameter)) for parameter in ours]
    settings = {"lr": 0.01, "momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
    reference = Muon(theirs, **settings, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    set_learning_rate([muon], recipe, lr_multiplier=1.0)
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
    first, last = mesh.sample_range(8)
    calls, orthogonalized = [], []
    for _ in range(2):
        parallel_model.model.zero_grad()
        parallel_model.forward_backward(ModelInputs(tokens[first:last, :-1], tokens[first:last, 1:]), divisor=8 * 16)
        for parameter, copy_ in zip(ours, theirs, strict=True):
            copy_.grad = full(parameter.grad)
        with counted(calls, orthogonalized):
            muon.step()
        reference.step()
    # Without a DTensor: the one dimension of DDP.
    dims = [getattr(group["params"][0], "device_mesh", torch.zeros(1)).ndim for group in muon.param_groups]
    return MuonOnMesh(
        max(float((full(p) - w).detach().abs().max()) for p, w in zip(ours, theirs, strict=True)) / 0.01,
        len(calls) / 2 / sum(dims),
        sum(orthogonalized) / 2 / sum(p.numel() for p in theirs),
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def counted(calls: list[str], orthogonalized: list[int]) -> Iterator[None]:
    """Note every collective of torch and every stack of matrices that is orthogonalized."""
    patch, before = pytest.MonkeyPatch(), len(calls)

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return original(*args, **more)

        return call

    def newton_schulz_noted(matrices: torch.Tensor) -> torch.Tensor:
        orthogonalized.append(matrices.numel())
        return newton_schulz(matrices)

    for name in ("all_to_all_single", "all_gather_single", "all_gather", "all_reduce", "broadcast", "all_to_all"):
        patch.setattr(torch.distributed, name, noting(name, getattr(torch.distributed, name)))
    patch.setattr(muon_module, "newton_schulz", newton_schulz_noted)
    with CommDebugMode() as dispatched:  # those of DTensor too
        yield
    patch.undo()
    calls.extend(["dispatched"] * (dispatched.get_total_counts() - (len(calls) - before)))


MUON_LAYOUTS: dict[str, tuple[dict[str, int], bool]] = {
    "FSDP 4, experts over ranks": ({}, True),
    "FSDP 4, uneven": ({}, False),
    "HSDP 2x2, experts": ({"dp_replicate": 2}, True),
    "EP 2 x FSDP 2": ({"ep": 2}, True),  # experts over two ranks, the rows of each over two
    "EP 4": ({"ep": 4}, True),
    "FSDP 2 x TP 2": ({"tp": 2}, False),  # both shard the same dimension
    "HSDP 2x1 x TP 2": ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, False),
    "TP 4": ({"tp": 4}, False),
    "DDP 4": ({"dp_replicate": 4, "dp_shard": 1}, True),
}


def _on_a_mesh(names: Sequence[str], dtype: Literal["bf16", "fp32"]) -> dict[str, MuonOnMesh]:
    return {name: _compare_with_full_matrices(*MUON_LAYOUTS[name], dtype) for name in names}


def check_muon(found: list[dict[str, MuonOnMesh]], tolerance: float) -> None:
    for results in found:
        for name, result in results.items():
            assert result.error < tolerance, (name, result)
            assert result.collectives <= 2, (name, result)
            assert 0 < result.share < 0.5, (name, result, "a quarter each, as even as matrices allow")
    for name in found[0]:
        assert sum(results[name].share for results in found) == pytest.approx(1), (name, "some matrix twice")


@pytest.mark.long
def test_muon_updates_shards_as_it_updates_full_matrices() -> None:
    names = list(MUON_LAYOUTS)
    check_muon(run_ranks(4, _on_a_mesh, names, "fp32", seconds=240, detail=False), 2e-5)
    check_muon(run_ranks(4, _on_a_mesh, names, "bf16", seconds=240, detail=False), 0.02)  # products of another shape


def test_lion_updates_as_in_its_paper() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3))
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.99))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    expected, momentum = weight.detach().clone(), torch.zeros(5, 3)
    for _ in range(4):
        gradient = torch.randn(5, 3)
        weight.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        expected = expected - 0.1 * (update + 0.5 * expected)
        momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(weight.detach(), expected)


def test_lion_resumes_from_its_state_dict() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4))
    optimizer = Lion([weight])
    weight.grad = torch.randn(4)
    optimizer.step()
    again = torch.nn.Parameter(weight.detach().clone())
    other = Lion([again])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    weight.grad = torch.randn(4)
    again.grad = weight.grad.clone()
    optimizer.step()
    other.step()
    assert torch.equal(weight, again)


@pytest.mark.long
def test_adamw_with_8_bit_states_learns_as_adamw_does() -> None:
    pytest.importorskip("torchao", reason="needs pip install 'zero2all[quant]'")
    tokens = torch.randint(0, 512, (4, 65), generator=torch.Generator().manual_seed(0))
    final_losses = []
    for name in ("adamw", "adamw-8bit"):
        config = ModelConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=512
        )  # fmt: skip
        model, recipe = Z2all(config).init_weights(0), OptimizerRecipe(name=name, lr=1e-3)
        optimizers = build_optimizers(model, recipe)
        set_learning_rate(optimizers, recipe, lr_multiplier=1.0)
        for _ in range(20):
            loss = model(tokens[:, :-1], targets_BS=tokens[:, 1:]).mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        final_losses.append(loss.item())
    assert final_losses[0] < 3
    assert final_losses[1] == pytest.approx(final_losses[0], abs=2e-3)


def logit_change(width: int, base: int | None, steps: int = 4) -> float:
    """Mean change of the logits after a few steps of AdamW at one learning rate."""
    config = ModelConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        max_position_embeddings=32, vocab_size=128, mup_base=base, initializer_range=0.05,
    )  # fmt: skip
    model = Z2all(config).init_weights(seed=1)
    recipe = OptimizerRecipe(lr=3e-3, weight_decay=0.0)
    optimizers = build_optimizers(model, recipe, mup_width_mult=config.mup_width_mult)
    set_learning_rate(optimizers, recipe, lr_multiplier=1.0)
    tokens = torch.randint(0, 128, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens[:, :-1])
    for _ in range(steps):
        model(tokens[:, :-1], targets_BS=tokens[:, 1:]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return (model(tokens[:, :-1]) - before).abs().mean().item()


def test_with_mup_the_logits_change_as_much_at_every_width() -> None:
    """The coordinate check of https://arxiv.org/abs/2203.03466: without muP the change grows with the width."""
    widths = (64, 128, 256, 512)
    plain = [logit_change(width, base=None) for width in widths]
    mup = [logit_change(width, base=64) for width in widths]
    assert plain == sorted(plain)
    assert plain[-1] / plain[0] > 3
    assert max(mup) / min(mup) < 1.7
    assert mup[0] == plain[0]
