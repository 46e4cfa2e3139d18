"""More rows for a vocabulary that grew."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero2all.model.z2all import Z2all


@torch.no_grad()
def grow_embeddings(model: Z2all, subtoken_ids: Sequence[Sequence[int]]) -> Z2all:
    """A copy of ``model`` with one new row per entry of ``subtoken_ids``: the mean of the rows of these old tokens.

    So a new token starts as what the model knows of its parts. Without subtokens (a reserved name) it starts as the
    mean of all rows, which no text has and which favours nothing.

    >>> grown = grow_embeddings(model, decompose_new_tokens(Tokenizer("old"), Tokenizer("new")))
    """
    before = model.config.vocab_size or 0
    config = model.config.model_copy(update={"vocab_size": before + len(subtoken_ids)})
    state = model.state_dict()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        known = state[name][:before]  # the rows after these only fill up the matrix
        padding = known.new_zeros(config.padded_vocab_size - before - len(subtoken_ids), known.shape[1])
        state[name] = torch.cat([known, _means(known, subtoken_ids), padding])
    grown = Z2all(config).to(model.embed_tokens.weight.device, model.embed_tokens.weight.dtype)
    grown.load_state_dict(state)
    return grown


def _means(rows: Tensor, subtoken_ids: Sequence[Sequence[int]]) -> Tensor:
    new = [rows[list(ids)].float().mean(0) if ids else rows.float().mean(0) for ids in subtoken_ids]
    return torch.stack(new).to(rows.dtype) if new else rows[:0]
