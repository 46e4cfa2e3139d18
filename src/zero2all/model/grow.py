"""More rows for a vocabulary that grew."""

from __future__ import annotations

from collections.abc import Sequence

from zero2all.model.weights import GrownVocabulary, ModelWeights, load_weights
from zero2all.model.z2all import Z2all


def grow_embeddings(model: Z2all, subtoken_ids: Sequence[Sequence[int]]) -> Z2all:
    """A copy of ``model`` with one new row per entry of ``subtoken_ids``: the mean of the rows of these old tokens.

    So a new token starts as what the model knows of its parts. Without subtokens (a reserved name) it starts as the
    mean of all rows, which no text has and which favours nothing.

    >>> grown = grow_embeddings(model, decompose_new_tokens(Tokenizer("old"), Tokenizer("new")))
    """
    before = model.config.vocab_size or 0
    config = model.config.model_copy(update={"vocab_size": before + len(subtoken_ids)})
    grown = Z2all(config).to(model.embed_tokens.weight.device, model.embed_tokens.weight.dtype)
    new_tokens = dict(enumerate(subtoken_ids, before))
    load_weights(grown.state_dict(), GrownVocabulary(ModelWeights(model), config, new_tokens))
    return grown
