from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.model.helpers import EXPERTS, make, some_tokens
from zero2all.model.moe import MoE, balance_loss
from zero2all.model.ops import choose_kernels
from zero2all.recipe import ModelConfig


def mixture(**changes: object) -> MoE:
    """One layer's experts with weights that matter."""
    model = make(moe={**EXPERTS, **changes})
    part = model.layers[0].mlp
    assert isinstance(part, MoE)
    return part


def dense_reference(part: MoE, x_ND: torch.Tensor) -> torch.Tensor:
    """Every expert on every token, weighed by a dense matrix that is zero where the router did not choose."""
    config = part.config
    logits = x_ND @ part.gate.weight.T
    scores = logits.softmax(-1) if config.scoring_func == "softmax" else logits.sigmoid()
    wanted = scores + part.bias if config.load_balancing == "bias" else scores
    chosen = torch.zeros_like(scores).scatter(1, wanted.topk(config.num_experts_per_tok).indices, 1.0)
    weights = scores * chosen
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x_ND)
    for e in range(config.num_experts):
        inner = F.silu(x_ND @ part.experts.gate_proj[e].T) * (x_ND @ part.experts.up_proj[e].T)
        out = out + weights[:, e, None] * (inner @ part.experts.down_proj[e].T)
    return out if part.shared_experts is None else out + part.shared_experts(x_ND)


@pytest.mark.parametrize("kernel", ["grouped", "reference"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 8},
        {"scoring_func": "sigmoid", "load_balancing": "bias"},
        {"n_shared_experts": 2, "norm_topk_prob": False},
    ],
)
def test_routing_is_a_dense_loop_over_experts(changes: dict[str, object], kernel: str) -> None:
    part = mixture(**changes)
    config = ModelConfig.model_validate({"vocab_size": 64, "ops": {"experts": kernel}})
    part.experts.ops = choose_kernels(config, torch.device("cpu"))
    if part.config.load_balancing == "bias":
        part.bias += torch.linspace(-0.3, 0.3, 8)
    x = torch.randn(2, 30, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for function in (lambda x: part(x)[0].flatten(0, 1), lambda x: dense_reference(part, x.flatten(0, 1))):
        part.zero_grad()
        x = x.detach().requires_grad_()
        out = function(x)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        found.append([out.detach(), x.grad, *(p.grad.clone() for p in part.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 5
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_balance_loss_is_one_when_even_and_more_when_not() -> None:
    part = mixture().train()
    x = torch.randn(1, 4000, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        part.gate.weight.mul_(1e-4)
        even = part(x)[1]
        part.gate.weight[3] += 1.0
        uneven = part(x.abs())[1]
    assert balance_loss(*even).item() == pytest.approx(1.0, abs=0.02)
    assert balance_loss(*uneven).item() > 2.0
    assert even.counts_E.sum() == uneven.counts_E.sum() == 2 * 4000
    assert part.eval()(x)[1] is None


@pytest.mark.parametrize("balance", ["aux", "bias", "none"])
def test_the_load_becomes_even_on_skewed_data(balance: str) -> None:
    """Similar tokens go to the same experts; balancing spreads them, and without it they stay."""
    changes = {
        "moe": {**EXPERTS, "load_balancing": balance, "router_aux_loss_coef": 0.3, "bias_update_rate": 0.02},
        "num_hidden_layers": 2,
    }
    model = make(**changes).train()
    tokens = some_tokens(rows=8, length=33, below=12)  # a dozen different tokens, so inputs cluster
    with torch.no_grad():
        for block in model.layers:
            block.mlp.gate.weight[:2] += 0.4 * torch.sign(block.mlp.gate.weight[:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    worst = []
    for _ in range(50):
        model(tokens[:, :-1], targets_BS=tokens[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        worst.append(max(float(block.mlp.load.max() / block.mlp.load.mean()) for block in model.layers))
        model.update_expert_bias()
    start, end = worst[0], sum(worst[-10:]) / 10
    assert start > 2.0
    if balance == "none":
        assert end > 1.8
    else:
        assert end < 1.6


def test_the_gradient_has_the_balance_loss_and_the_value_has_not() -> None:
    tokens = some_tokens()
    values, gradients = [], []
    for weight in (0.0, 10.0):
        model = make(moe={**EXPERTS, "router_aux_loss_coef": weight}).train()
        loss = model(tokens, targets_BS=tokens.roll(-1, 1)).mean()
        loss.backward()
        values.append(loss.item())
        gradients.append(model.layers[0].mlp.gate.weight.grad.clone())
    assert values[0] == values[1]
    assert (gradients[1] - gradients[0]).abs().max() > 1e-2


def test_the_bias_moves_towards_the_idle_and_is_saved() -> None:
    model = make(moe={**EXPERTS, "load_balancing": "bias", "bias_update_rate": 0.01}).train()
    part = model.layers[0].mlp
    before = part.bias.clone()
    model(some_tokens(), targets_BS=some_tokens())
    load = part.load.clone()
    assert load.sum() == 2 * 80
    model.update_expert_bias()
    assert torch.equal(part.bias, before + 0.01 * torch.sign(20.0 - load))
    assert not part.load.any()
    names = [name for name in model.state_dict() if name.endswith("bias")]
    assert names == [f"layers.{n}.mlp.bias" for n in range(3)]


def test_experts_are_filled_one_by_one_whatever_else_is_there() -> None:
    """So that a device that holds some of them gets what the full model has."""
    few = make(moe=EXPERTS).init_weights(5).layers[1].mlp.experts
    more = make(moe={**EXPERTS, "num_experts": 16}).init_weights(5).layers[1].mlp.experts
    assert torch.equal(few.up_proj, more.up_proj[:8])
    assert not torch.equal(few.up_proj[0], few.up_proj[1])
