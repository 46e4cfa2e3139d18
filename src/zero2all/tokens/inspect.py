"""What is in a token store, for people.

Which tokens of a conversation are learned (``z2a tokens inspect``), and openings of documents as prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby, islice
from pathlib import Path

from rich.console import Console
from rich.text import Text

from zero2all.tokenizer import Tokenizer
from zero2all.tokens.packed_dataset import PackedDataset
from zero2all.tokens.token_store import TokenShard, TokenStore

LEARNED, CONTEXT = "bold black on #bfe3c6", "dim"


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens that are all learned, or all context."""

    text: str
    learned: bool


@dataclass(frozen=True)
class InspectedConversation:
    """A conversation as training reads it."""

    gid: str
    source: str
    tokens: int
    targets: int
    runs: list[TokenRun]


def inspect_conversations(dataset: PackedDataset, tokenizer: Tokenizer, count: int) -> list[InspectedConversation]:
    """The first conversations, in the order of training."""
    return list(islice(_conversations(dataset, tokenizer), count))


def _conversations(dataset: PackedDataset, tokenizer: Tokenizer) -> Iterator[InspectedConversation]:
    for sample in range(dataset.samples_per_epoch):
        row = dataset.read(sample, sample + 1)
        if row.sources[0] not in dataset.conversation_rows:
            continue
        begin = 0
        for span in dataset.documents(sample, sample + 1):
            end = begin + span.tokens
            ids, mask = row.tokens[0, begin:end].tolist(), row.mask[0, begin:end].tolist()
            yield InspectedConversation(span.gid, span.source, len(ids), sum(mask), _runs(tokenizer, ids, mask))
            begin = end


def _runs(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[bool]) -> list[TokenRun]:
    grouped = groupby(zip(ids, mask, strict=True), key=lambda token: token[1])
    return [
        TokenRun(b"".join(tokenizer.token_bytes[id] for id, _ in tokens).decode("utf-8", "replace"), learned)
        for learned, tokens in grouped
    ]


def render_conversations(conversations: Sequence[InspectedConversation], *, colour: bool) -> str:
    """What is learned in colour, or without colour between ⟦ and ⟧."""
    out = StringIO()
    console = Console(file=out, force_terminal=colour, color_system="truecolor" if colour else None, soft_wrap=True)
    for one in conversations:
        text = Text(f"{one.source} {one.gid}: {one.targets} of {one.tokens} tokens are learned\n")
        for run in one.runs:
            if colour:
                text.append(run.text, LEARNED if run.learned else CONTEXT)
            else:
                text.append(f"⟦{run.text}⟧" if run.learned else run.text)
        console.print(text)
    tokens, targets = (sum(getattr(one, name) for one in conversations) for name in ("tokens", "targets"))
    share = f", {targets / tokens:.0%} of all tokens" if tokens else ""
    console.print(f"{len(conversations)} conversations, {targets:,} targets{share}")
    return out.getvalue()


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
