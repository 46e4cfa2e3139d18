"""Prompts in the language of the corpus."""

from __future__ import annotations

from pathlib import Path

from zero2all.tokenizer import Tokenizer
from zero2all.tokens.token_store import TokenShard, TokenStore

PROMPT_TOKENS = 12
MAX_SOURCES = 8  # with a prompt of their own, where there are more sources than prompts were asked for


def opening_prompts(tokens_dir: Path, tokenizer: Tokenizer, count: int) -> list[str]:
    """The beginnings of documents, from each source in turn: ``count`` of them, or one of each of up to 8 sources.

    They are validation documents, or training ones of a source that has no others. Conversations give none: a prompt is
    text, and they begin with a special token.
    """
    valid, training = TokenStore(tokens_dir, "valid").sources, TokenStore(tokens_dir, "train").sources
    found = (_first_shard([*valid.get(name, []), *shards]) for name, shards in {**valid, **training}.items())
    shards = [shard for shard in found if shard is not None]
    count = max(count, min(MAX_SOURCES, len(shards)))
    special = set(tokenizer.special_ids.values())
    openings: list[str] = []
    for turn in range(count * max(1, len(shards))):
        if not shards or len(openings) == count:
            break
        shard, number = shards[turn % len(shards)], turn // len(shards)
        if number + 1 < len(shard.document_offsets):
            first, last = shard.document_offsets[number : number + 2]
            ids = shard.tokens[first : min(last - 1, first + PROMPT_TOKENS)].tolist()
            if special.isdisjoint(ids):
                openings.append(tokenizer.decode(ids).strip("\ufffd"))
    return openings


def _first_shard(shards: list[TokenShard]) -> TokenShard | None:
    """The first one with a document."""
    return next((shard for shard in shards if len(shard.document_offsets) > 1), None)
