"""``z2a tokenizer export``: the vocabulary in tiktoken's format."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from zero2all.io import write_json, write_text
from zero2all.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class TiktokenFiles:
    ranks: str
    settings: str
    tokens: int
    """Number of ranks."""


def export_tiktoken(tokenizer: Tokenizer, out: Path) -> TiktokenFiles:
    """Write the rank file ``out``, and beside it ``out``.json with the pattern and special tokens it has no place for.

    >>> ranks = tiktoken.load.load_tiktoken_bpe("out.tiktoken")
    >>> settings = json.load(open("out.tiktoken.json"))
    >>> tiktoken.Encoding("mine", mergeable_ranks=ranks, **settings)
    """
    pattern = tokenizer.vocabulary.pattern  # before anything is written: not every tokenizer has one
    ranks = sorted(tokenizer.vocabulary.ranks.items(), key=lambda item: item[1])
    write_text(out, "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks))
    settings = out.with_name(out.name + ".json")
    write_json(settings, {"pat_str": pattern, "special_tokens": tokenizer.special_ids})
    return TiktokenFiles(str(out), str(settings), len(ranks))
