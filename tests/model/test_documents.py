"""Packed rows: a document is computed as if it were alone."""

from __future__ import annotations

import pytest
import torch

from tests.model.helpers import EXPERTS, make
from zero2all.model import IGNORE_INDEX, ModelInputs, document_starts
from zero2all.model.ops.document_attention import document_attention, segments

END = 7
LENGTHS = [[9, 1, 22, 8], [40], [1, 1, 38], [20, 20]]
VARIANTS = {
    "plain": {},
    "window": {"sliding_window": 5, "full_attention_interval": 2},
    "qk-norm, bias": {"qk_norm": True, "qkv_bias": True},
    "experts": {"moe": EXPERTS},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


def packed_rows(seed: int = 3) -> torch.Tensor:
    """[4, 40] of documents of the lengths above, each beginning with an end-of-text token."""
    rows = torch.randint(8, 320, (4, 40), generator=torch.Generator().manual_seed(seed))
    for row, lengths in zip(rows, LENGTHS, strict=True):
        row[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = END
    return rows


def next_inside(tokens: torch.Tensor) -> torch.Tensor:
    """Targets: the next token of the same document, none at its end."""
    targets = tokens.roll(-1, dims=-1)
    targets[..., -1] = IGNORE_INDEX
    return torch.where(targets == END, IGNORE_INDEX, targets)


def test_where_documents_begin() -> None:
    tokens = torch.tensor([[1, 2, END, END, 3, 4], [END, 1, 1, 1, 1, END]])
    assert document_starts(tokens == END).tolist() == [[0, 0, 2, 3, 3, 3], [0, 0, 0, 0, 0, 5]]


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_loss_is_that_of_the_documents_alone(variant: str, kernel: str) -> None:
    model, rows = make(**VARIANTS[variant], ops={"attention": kernel}), packed_rows()
    with torch.inference_mode():
        packed = model(ModelInputs(rows, targets_BS=next_inside(rows), doc_starts_BS=document_starts(rows == END)))
        alone = []
        for row, lengths in zip(rows, LENGTHS, strict=True):
            for document in row.split(lengths):
                alone.append(model(document[None], targets_BS=next_inside(document[None]))[0])
    torch.testing.assert_close(packed.flatten(), torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_another_documents_text_changes_no_bit(variant: str, kernel: str) -> None:
    model, rows = make(**VARIANTS[variant], ops={"attention": kernel}), packed_rows()
    changed = rows.clone()
    changed[0, 11:32] = torch.randint(8, 320, (21,), generator=torch.Generator().manual_seed(8))  # the third document
    starts = document_starts(rows == END)
    assert torch.equal(starts, document_starts(changed == END))
    with torch.inference_mode():
        before, after = (model(ModelInputs(tokens, doc_starts_BS=starts)) for tokens in (rows, changed))
    same = torch.ones(4, 40, dtype=torch.bool)
    same[0, 10:32] = False
    if variant == "experts":  # tokens share an expert's product, whose rows are summed in another order
        torch.testing.assert_close(before[same], after[same], atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(before[same], after[same])
    assert not torch.equal(before[0, 12:32], after[0, 12:32])


def test_without_starts_documents_do_see_each_other() -> None:
    """Else the tests above would pass for no reason."""
    model, rows = make(), packed_rows()
    with torch.inference_mode():
        one, other = model(rows), model(ModelInputs(rows, doc_starts_BS=document_starts(rows == END)))
    assert (one[0, 10:] - other[0, 10:]).abs().max() > 1e-2
    torch.testing.assert_close(one[1], other[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[64], [40, 24]], ids=["one document", "two documents"])
def test_attention_gradients_in_bf16_are_those_of_fp32(lengths: list[int]) -> None:
    """The backward pass of short rows is computed in fp32: its error is that of rounding inputs and results."""
    generator = torch.Generator().manual_seed(5)
    starts = torch.zeros(3, 64, dtype=torch.int32)
    starts[1:, lengths[0] :] = lengths[0] if len(lengths) > 1 else 0
    exact = [torch.randn(3, heads, 64, 16, generator=generator).bfloat16().float() for heads in (4, 2, 2)]
    weights = torch.randn(3, 4, 64, 16, generator=generator)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (x.detach().to(dtype, copy=True).requires_grad_() for x in exact)
        out = document_attention(q, k, v, starts, 64)
        (out.float() * weights).sum().backward()
        gradients.append([x.grad.float() for x in (q, k, v) if x.grad is not None])
    for plain, half in zip(*gradients, strict=True):
        assert (plain - half).norm() < 0.01 * plain.norm()


def test_rows_of_one_document_are_one_call() -> None:
    starts = torch.zeros(3, 8, dtype=torch.int32)
    assert [segment.rows for segment in segments(starts, 8)] == [slice(None)]
    assert len(list(segments(starts, 4))) == 6
    starts[1, 5:] = 5
    assert len(list(segments(starts, 8))) == 4
