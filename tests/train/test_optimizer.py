from __future__ import annotations

import copy

import pytest
import torch

from zero2all.model import Z2all
from zero2all.recipe import ModelConfig, OptimizerRecipe
from zero2all.train.optimizer import Lion, build_optimizers, set_learning_rate


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_only_matrices_decay_and_every_parameter_is_moved_once(name: str) -> None:
    model = Z2all(ModelConfig(vocab_size=64, qkv_bias=True, qk_norm=True))
    optimizers = build_optimizers(model, OptimizerRecipe(name=name, weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moved = [(names[id(p)], g["weight_decay"]) for o in optimizers for g in o.param_groups for p in g["params"]]
    assert sorted(n for n, _ in moved) == sorted(names.values())
    for parameter, decay in moved:
        assert decay == (0.0 if parameter.endswith(("norm.weight", "bias")) else 0.3)
    if name == "muon":
        by_muon = [names[id(p)] for p in optimizers[1].param_groups[0]["params"]]
        assert len(by_muon) == 7 * 7
        assert all(n.startswith("layers.") and n.endswith("proj.weight") for n in by_muon)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_the_recipe_reaches_every_group(name: str) -> None:
    model = Z2all(ModelConfig(vocab_size=64))
    recipe = OptimizerRecipe(name=name, lr=0.5, muon_lr=0.25, momentum=0.7, betas=(0.6, 0.8), eps=1e-5)
    optimizers = build_optimizers(model, recipe)
    set_learning_rate(optimizers, recipe, share=0.5)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            assert group["lr"] == (0.125 if isinstance(optimizer, torch.optim.Muon) else 0.25)
            if not isinstance(optimizer, torch.optim.Muon):
                assert group.get("betas", recipe.betas) == (0.6, 0.8)
                assert group.get("eps", recipe.eps) == 1e-5
            assert group.get("momentum", recipe.momentum) == 0.7


def test_lion_moves_as_its_paper_says() -> None:
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


def test_lion_comes_back_from_its_state() -> None:
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


@pytest.mark.slow
def test_adamw_with_states_of_8_bits_learns_as_adamw_does() -> None:
    pytest.importorskip("torchao", reason="needs pip install 'zero2all[quant]'")
    tokens = torch.randint(0, 512, (4, 65), generator=torch.Generator().manual_seed(0))
    ends = []
    for name in ("adamw", "adamw-8bit"):
        config = ModelConfig(
            hidden_size=128, intermediate_size=256, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=512
        )  # fmt: skip
        model, recipe = Z2all(config).init_weights(0), OptimizerRecipe(name=name, lr=1e-3)
        optimizers = build_optimizers(model, recipe)
        set_learning_rate(optimizers, recipe, share=1.0)
        for _ in range(20):
            loss = model(tokens[:, :-1], targets_BS=tokens[:, 1:]).mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(loss.item())
    assert ends[0] < 3
    assert ends[1] == pytest.approx(ends[0], abs=2e-3)


def logits_moved(width: int, base: int | None, steps: int = 4) -> float:
    """How far a few steps of AdamW at one learning rate move the logits, on average."""
    config = ModelConfig(
        hidden_size=width, intermediate_size=2 * width, n_layers=2, n_heads=width // 16, n_kv_heads=width // 16,
        context=32, vocab_size=128, mup_base=base, init_std=0.05,
    )  # fmt: skip
    model = Z2all(config).init_weights(seed=1)
    recipe = OptimizerRecipe(lr=3e-3, weight_decay=0.0)
    optimizers = build_optimizers(model, recipe, narrower=config.narrower)
    set_learning_rate(optimizers, recipe, share=1.0)
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


def test_with_width_transfer_the_logits_move_as_far_at_every_width() -> None:
    """The coordinate check of https://arxiv.org/abs/2203.03466: without the transfer they grow with the width."""
    widths = (64, 128, 256, 512)
    plain = [logits_moved(width, base=None) for width in widths]
    transferred = [logits_moved(width, base=64) for width in widths]
    assert plain == sorted(plain)
    assert plain[-1] / plain[0] > 3
    assert max(transferred) / min(transferred) < 1.7
    assert transferred[0] == plain[0]
