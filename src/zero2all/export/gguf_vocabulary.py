"""A tokenizer as the metadata of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from zero2all.errors import UsageError, Z2aError
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.text_vocabulary import BYTE_TOKEN
from zero2all.tokenizer.vocabulary import IM_END, PAD, PATTERNS

PRE_TOKENIZERS = {"zh-en-code": "smaug-bpe", "qwen2": "qwen2", "gpt2": "gpt-2"}
"""The name that llama.cpp has for each of our patterns."""


class TokenType(IntEnum):
    """As in GGUF."""

    NORMAL = 1
    CONTROL = 3
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GGUFVocabulary:
    model: str
    """``gpt2`` (byte-level BPE) or ``llama`` (sentencepiece)."""
    pre_tokenizer: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    """Of sentencepiece: a merge that comes first has the highest."""
    space_before: bool


def gguf_vocabulary(tokenizer: Tokenizer, rows: int) -> GGUFVocabulary:
    """``rows`` are those of the embedding; ids without a token are unused."""
    vocabulary = tokenizer.vocabulary
    if vocabulary.definition["model"].get("type", "BPE") != "BPE":
        raise UsageError("a unigram tokenizer cannot be written to GGUF: export with --format hf")
    tokens = [f"[PAD{id}]" for id in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    for token, id in vocabulary.ids.items():
        is_byte = vocabulary.is_sentencepiece and BYTE_TOKEN.fullmatch(token)
        tokens[id], types[id] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    for token, id in tokenizer.special_ids.items():
        tokens[id], types[id] = token, TokenType.CONTROL
    merges = vocabulary.merges
    if vocabulary.is_sentencepiece:
        ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
        scores = [-float(ranks.get(token, 0)) for token in tokens]
        return GGUFVocabulary("llama", "default", tokens, types, [], scores, vocabulary.space_before != "never")
    return GGUFVocabulary(
        "gpt2", _pre_tokenizer(tokenizer), tokens, types, [" ".join(pair) for pair in merges], [], False
    )


def _pre_tokenizer(tokenizer: Tokenizer) -> str:
    try:
        pattern = tokenizer.vocabulary.pattern
    except Z2aError:
        pattern = ""
    for name, known in PATTERNS.items():
        if pattern == known:
            return PRE_TOKENIZERS[name]
    raise UsageError(
        "llama.cpp has no pre-tokenizer that splits text as this tokenizer does; it has those of tokenizer.pattern: "
        f"{', '.join(PRE_TOKENIZERS)}. Export with --format hf"
    )


def add_vocabulary(writer: Any, tokenizer: Tokenizer, rows: int, begin_id: int | None) -> None:
    """``begin_id``: the token that text begins with, None if it begins with none."""
    vocabulary = gguf_vocabulary(tokenizer, rows)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_before)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    special = tokenizer.special_ids
    if IM_END in special:
        writer.add_eot_token_id(special[IM_END])
    if PAD in special:
        writer.add_pad_token_id(special[PAD])
    # Without one, llama.cpp would take its default, which is some other token.
    writer.add_bos_token_id(tokenizer.eos_token_id if begin_id is None else begin_id)
    writer.add_add_bos_token(begin_id is not None)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
