"""torch.compile takes every part as one graph: a break would cost at each of a thousand steps and say nothing.

The backend that writes no code is enough to see that, and quick; the real one runs where it has most to get wrong.
"""

from __future__ import annotations

import pytest
import torch

from tests.model.helpers import EXPERTS, make, some_tokens
from zero2all.model import ModelInputs, document_starts

pytestmark = pytest.mark.slow

VARIANTS = {
    "plain": {},
    "everything": {"qk_norm": True, "qkv_bias": True, "sliding_window": 7, "moe": {**EXPERTS, "n_shared_experts": 1}},
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("variant", "packed", "backend"),
    [
        ("plain", False, "aot_eager"),
        ("plain", True, "aot_eager"),
        pytest.param("plain", True, "inductor", marks=pytest.mark.long),
        ("everything", False, "aot_eager"),
        pytest.param("everything", True, "inductor", marks=pytest.mark.long),
    ],
)
def test_a_block_is_one_graph_and_gives_the_same(variant: str, packed: bool, backend: str) -> None:
    model = make(**VARIANTS[variant], num_hidden_layers=1).train()
    tokens = some_tokens(below=20)
    starts = document_starts(tokens == 7) if packed else None
    rotary, mask = model.rotary(40, starts), model.attention_masks(40, starts)[model.config.layer_window(0)]
    results = []
    for block in (model.layers[0], torch.compile(model.layers[0], fullgraph=True, backend=backend)):
        x = model.embed_tokens(tokens).detach().requires_grad_()
        model.zero_grad()
        out, routed = block(x, rotary, mask)
        extra = [] if routed is None else [routed.counts_E, routed.mean_score_E]
        (out.square().mean() + sum(score_E.square().sum() for score_E in extra[1:])).backward()
        results.append([out, *extra, x.grad, *(p.grad for p in model.layers[0].parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "backend"), [("chunked", "inductor"), ("torch", "aot_eager"), ("reference", "aot_eager")]
)
def test_the_loss_is_one_graph_and_gives_the_same(kernel: str, backend: str) -> None:
    model = make(ops={"cross_entropy": kernel}).train()
    x, targets = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0)), some_tokens()
    results = []
    for head in (model.lm_head, torch.compile(model.lm_head, fullgraph=True, backend=backend)):
        x = x.detach().requires_grad_()
        model.zero_grad()
        losses = head(x, targets)
        (losses.sum() / 80).backward()
        results.append([losses, x.grad, model.lm_head.weight.grad])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, atol=2e-5, rtol=1e-4)


def test_a_full_training_pass_is_one_graph() -> None:
    model = make(moe=EXPERTS, z_loss=1e-3, mtp_weight=0.3).train()
    tokens = some_tokens(below=20)
    starts = document_starts(tokens == 7)
    gradients = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        call(ModelInputs(tokens, targets_BS=tokens.roll(-1, 1), doc_starts_BS=starts)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, atol=2e-4, rtol=1e-3)
