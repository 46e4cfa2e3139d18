"""Layouts against one process. ``z2a bench parity`` runs all of them for longer."""

from __future__ import annotations

import pytest
import torch

from zero2all.parallel import Layout, Sizes, Spread, parity
from zero2all.recipe import ModelConfig, ParallelRecipe

ON_TWO = (
    "FSDP 2, accumulated",
    "TP 2 + SP, parallel loss",
    "TP 2",
    "PP 2 1f1b",
    "PP 2 zbv",
    "CP 2 gather",
    "CP 2 ulysses",
    "EP 2",
)
ON_FOUR = ("HSDP 2x2", "FSDP 2 x TP 2", "TP 2 x PP 2", "EP 2 x FSDP 2")


def outcomes(names: tuple[str, ...], variants: tuple[parity.Variant, ...], detail: bool = True) -> list[parity.Outcome]:
    chosen = [case for case in parity.cases() if case.name in names]
    assert {case.name for case in chosen} == set(names)
    return list(parity.measure(chosen, 3, ("sgd",), variants, seconds=240, detail=detail))


def check(found: list[parity.Outcome]) -> None:
    wrong = [outcome for outcome in found if not outcome.equal]
    assert not wrong, wrong


@pytest.mark.slow
def test_two_ranks_equal_one_process() -> None:
    check(outcomes(ON_TWO, ("checkpointing", "documents")))


@pytest.mark.slow
def test_four_ranks_equal_one_process() -> None:
    check(outcomes(ON_FOUR, ("documents",)))


@pytest.mark.slow
def test_copies_equal_one_process() -> None:
    check(outcomes(("DDP 2, accumulated",), ("plain",), detail=False))


def test_every_layout_of_the_issue_is_in_the_table() -> None:
    names = {case.name for case in parity.cases()}
    assert len(names) == len(parity.cases())
    for kind in ("DDP 4", "FSDP 4", "HSDP 2x2", "TP 4 + SP, parallel loss", "CP 4", "EP 4", "FSDP 2 x TP 2 x PP 2"):
        assert any(kind in name for name in names), kind
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"):
        assert {f"PP 2 {schedule}", f"PP 4 {schedule}"} <= names


def test_one_process_is_the_model_itself() -> None:
    """The trivial layout adds nothing: same gradients and the same norm as a bare loop, bit for bit."""
    from zero2all.model import Z2all

    config = ModelConfig(
        hidden_size=32, intermediate_size=64, n_layers=2, n_heads=4, n_kv_heads=2, context=16, vocab_size=64
    )
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
    spread = Spread(config, ParallelRecipe(), Layout(Sizes(), torch.device("cpu")), seed=5, micro_samples=2)
    losses = spread.backward(tokens[:, :-1], tokens[:, 1:], divisor=64)
    bare = Z2all(config).init_weights(5)
    for piece in tokens.split(2):
        (bare(piece[:, :-1], targets_BS=piece[:, 1:]).sum() * (1 / 64)).backward()
    ours = dict(spread.model.named_parameters())
    for name, parameter in bare.named_parameters():
        assert torch.equal(ours[name].grad, parameter.grad), name
    norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
    assert spread.clip(0.1).item() == pytest.approx(norm.item(), rel=1e-6)
    for name, parameter in bare.named_parameters():
        assert torch.allclose(ours[name].grad, parameter.grad, rtol=1e-5, atol=1e-9), name
    assert spread.total(losses.sum()).item() == losses.sum().item()
    assert losses.shape == (4, 16)
