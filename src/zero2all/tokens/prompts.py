"""Prompts in the language of the corpus."""

from __future__ import annotations

from pathlib import Path

from zero2all.tokenizer import Tokenizer
from zero2all.tokens.token_store import TokenStore

PROMPT_TOKENS = 12


def opening_prompts(tokens_dir: Path, tokenizer: Tokenizer, count: int) -> list[str]:
    """The beginnings of validation documents, from each source in turn; without a validation set, of training ones.

    Conversations give none: a prompt is text, and they begin with a special token.
    """
    valid = TokenStore(tokens_dir, "valid").sources.values()
    training = TokenStore(tokens_dir, "train").sources.values()
    shards = [shards[0] for shards in valid if shards] or [shards[0] for shards in training if shards]
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
