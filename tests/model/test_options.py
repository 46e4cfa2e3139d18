"""Soft-cap, z-loss, multi-token prediction, windows, a vocabulary that is no multiple of 64."""

from __future__ import annotations

import pytest
import torch

from tests.model.helpers import make, some_tokens
from zero2all.model import IGNORE_INDEX, ModelInputs, Z2all, document_starts
from zero2all.recipe import ModelConfig


def test_softcap_bends_the_logits() -> None:
    plain, capped = make(), make(final_logit_softcapping=2.0)
    with torch.inference_mode():
        logits = plain(some_tokens())
        torch.testing.assert_close(capped(some_tokens()), 2.0 * torch.tanh(logits / 2.0))


@pytest.mark.parametrize("kernel", ["chunked", "torch", "reference"])
def test_rows_past_the_vocabulary_never_count(kernel: str) -> None:
    model, tokens = make(vocab_size=301, ops={"cross_entropy": kernel}).train(), some_tokens(below=301)
    assert model.lm_head.weight.shape == model.embed_tokens.weight.shape == (320, 64)
    assert model(tokens).shape == (2, 40, 301)
    with torch.no_grad():
        model.lm_head.weight[301:] = 1e3  # would win every softmax
    losses = model(tokens, targets_BS=tokens.roll(-1, 1))
    plain = -model(tokens).log_softmax(-1).gather(-1, tokens.roll(-1, 1)[..., None])[..., 0]
    torch.testing.assert_close(losses, plain, atol=1e-5, rtol=1e-5)
    losses.mean().backward()
    assert not model.lm_head.weight.grad[301:].any()
    assert not model.embed_tokens.weight.grad[301:].any()


@pytest.mark.parametrize("kernel", ["chunked", "reference"])
def test_z_loss_is_in_the_gradient_only_and_only_in_training(kernel: str) -> None:
    tokens = some_tokens()
    targets = tokens.roll(-1, 1)
    targets[:, :5] = IGNORE_INDEX
    model = make(z_loss=0.1, ops={"cross_entropy": kernel}).train()
    losses = model(tokens, targets_BS=targets)
    with torch.no_grad():
        torch.testing.assert_close(losses, make()(tokens, targets_BS=targets), atol=1e-5, rtol=1e-5)
    losses.mean().backward()
    other = make().train()
    logits = other(tokens)
    plain = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none"
    )
    extra = 0.1 * logits.logsumexp(-1).square() * (targets != IGNORE_INDEX)
    (plain + extra).mean().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, atol=2e-5, rtol=1e-4)


def test_the_further_block_learns_the_token_after_next_and_leaves_the_loss_alone() -> None:
    tokens = some_tokens(length=41)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model, plain = make(mtp_weight=0.5).train(), make().train()
    plain.load_state_dict(model.state_dict(), strict=False)
    loss = model(inputs, targets_BS=targets).mean()
    assert torch.equal(loss, plain(inputs, targets_BS=targets).mean())
    loss.backward()
    assert model.mtp is not None
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.mtp.parameters())
    optimizer = torch.optim.AdamW(model.mtp.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        state = plain.embed_tokens(inputs)
        rotary, masks = model.rotary(40, None), model.attention_masks(40, None)
        out, _ = model.mtp(state, model.embed_tokens(targets), rotary, masks[None])
        loss = model.lm_head(out[:, :-1], targets[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_the_token_after_next_is_never_of_another_document() -> None:
    """The last two positions of a document have none, so the next document's text cannot change their gradient."""
    tokens = some_tokens(rows=1, length=41).clamp(min=8)
    tokens[0, 20] = 7
    gradients = []
    for shift in (0, 1):
        changed = tokens.clone()
        changed[0, 21:] = (changed[0, 21:] + shift).clamp(max=319)
        model = make(mtp_weight=0.5, num_hidden_layers=1).train()
        starts = document_starts(changed[:, :-1] == 7)
        targets = changed[:, 1:].clone()
        targets[:, 19:] = IGNORE_INDEX  # the second document, and the first one's end
        model(ModelInputs(changed[:, :-1], targets_BS=targets, doc_starts_BS=starts)).sum().backward()
        gradients.append(model.mtp.proj.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_a_window_hides_what_is_farther_back(kernel: str) -> None:
    model, tokens = make(sliding_window=4, num_hidden_layers=1, ops={"attention": kernel}), some_tokens()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 320
    with torch.inference_mode():
        difference = (model(tokens) - model(changed)).abs().amax((0, 2))
    seen = [position for position in range(40) if difference[position] > 1e-4]
    assert seen == [10, 11, 12, 13]


def test_a_model_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocab_size is not set"):
        Z2all(ModelConfig())
