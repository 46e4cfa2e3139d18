"""Vocabularies of sentencepiece: trained through its package, and extended.

``tokenizer.trainer: sentencepiece-bpe`` and ``-unigram`` train one; ``z2a tokenizer extend`` extends one like LLaMA's.

The package holds all text in memory, so it gets as many documents as fit. The settings are from LLaMA's vocabulary
(no normalization, byte fallback, single digits), but without a space before each text: so every text round-trips, also
after a special token.

A character that a vocabulary does not have is encoded as its bytes. So there are two kinds of new tokens: such
characters, and pairs of tokens. Both are chosen by how many tokens of the text they save.
"""

from __future__ import annotations

import heapq
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zero2all.base.console import progress, say
from zero2all.base.errors import UsageError, Z2aError, need
from zero2all.base.paths import arrow_source
from zero2all.base.records import DocumentsManifest
from zero2all.base.units import show_bytes
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer.manifest import LearnedVocabulary
from zero2all.tokenizer.merge import Merge, learn_merges
from zero2all.tokenizer.pair_index import Words, new_words
from zero2all.tokenizer.sentencepiece_model import (
    PieceType,
    SentencePiece,
    append_pieces,
    parse_model,
    piece_merges,
    to_tokenizer_json,
)
from zero2all.tokenizer.tokenizer import Tokenizer
from zero2all.tokenizer.tokenizer_json import BYTE_TOKEN, SPACE_MARK
from zero2all.tokenizer.vocabulary import UNKNOWN, reserved_tokens
from zero2all.tokenizer.word_count import BATCH_DOCUMENTS, select_documents

MEMORY_PER_BYTE = 28  # of text: 26 measured for Chinese, 9 for English (python -m benchmarks sentencepiece_memory)
PROCESS_MEMORY = 300 << 20
MAX_LINE_CHARACTERS = 1000  # the package skips lines above 4192 bytes
TRAINER_OPTIONS: dict[str, Any] = {
    "hard_vocab_limit": False,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "unk_id": 0,
    "unk_piece": UNKNOWN,
    "bos_id": -1,
    "eos_id": -1,
    "pad_id": -1,
    "num_threads": 8,  # a fixed number, because the result of unigram training depends on it
    "minloglevel": 2,
}


def _sampled_lines(shards: list[Path], share: float) -> Iterator[str]:
    """Lines of the training documents, sampled by document."""
    for shard in shards:
        with pq.ParquetFile(arrow_source(shard), buffer_size=1 << 20) as file:
            for batch in file.iter_batches(batch_size=BATCH_DOCUMENTS, columns=["gid", "content"]):
                selected = pa.array(select_documents(batch.column("gid"), share))
                for text in batch.column("content").filter(selected).to_pylist():
                    yield from split_lines(text)


def split_lines(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for start in range(0, len(line), MAX_LINE_CHARACTERS):
            yield line[start : start + MAX_LINE_CHARACTERS]


def train_sentencepiece(
    recipe: TokenizerRecipe, documents: Path, corpus: DocumentsManifest, special: tuple[str, ...]
) -> LearnedVocabulary:
    """A vocabulary of ``recipe.vocab_size`` tokens with these special tokens."""
    package = need("sentencepiece", "tokenizer")
    sources = corpus.splits["train"].values()
    available = sum(part.bytes for part in sources)
    limit = min(recipe.train_bytes, (recipe.max_memory - PROCESS_MEMORY) // MEMORY_PER_BYTE)
    if limit < min(available, recipe.train_bytes):
        say(f"sentencepiece trains on {show_bytes(limit)}: more would not fit into tokenizer.max_memory")
    shards = [documents / "train" / shard for part in sources for shard in part.shards]
    share = min(1.0, limit / available) if available else 0.0
    written, used = io.BytesIO(), 0

    def counted_lines() -> Iterator[str]:
        nonlocal used
        for line in _sampled_lines(shards, share):
            used += len(line.encode())
            yield line

    try:
        with progress("training with sentencepiece"):
            package.SentencePieceTrainer.train(
                sentence_iterator=counted_lines(),
                model_writer=written,
                model_type=recipe.trainer.removeprefix("sentencepiece-"),
                vocab_size=recipe.vocab_size,
                control_symbols=list(special),
                **TRAINER_OPTIONS,
            )
    except (RuntimeError, OSError) as error:
        reason = str(error).rpartition("] ")[2] or "there is no text"
        raise UsageError(f"sentencepiece cannot train this vocabulary: {reason}") from error
    return _filled_up(written.getvalue(), recipe.vocab_size, special, used)


def _filled_up(data: bytes, vocab_size: int, special: tuple[str, ...], used: int) -> LearnedVocabulary:
    """The model relies on the size, so a text too small to fill it leaves reserved names for later use."""
    learned = len(parse_model(Path("tokenizer.model"), data).pieces)
    names = [name for name in reserved_tokens(vocab_size) if name not in special][: vocab_size - learned]
    data = append_pieces(data, [SentencePiece(name, 0.0, PieceType.CONTROL) for name in names], vocab_size)
    model = parse_model(Path("tokenizer.model"), data)
    all_special = [piece.text for piece in model.pieces if piece.type in (PieceType.UNKNOWN, PieceType.CONTROL)]
    definition = json.dumps(to_tokenizer_json(model), ensure_ascii=False, indent=1).encode()
    return LearnedVocabulary(definition, all_special, vocab_size - len(all_special), used, None, data)


Counts = np.ndarray[Any, np.dtype[np.int64]]


class _Candidate(NamedTuple):
    saved: int
    """Tokens."""
    token: bytes


def learn_pieces(
    old: Tokenizer,
    words: list[str],
    counts: Counts,
    num_new_tokens: int,
    min_frequency: int,
    advance: Callable[[float], None],
) -> tuple[list[str], list[list[str]]]:
    """The names of new tokens, and all merges of the vocabulary."""
    characters = _missing_characters(old, words, counts)
    # No merge may make a token that is not text, or a byte: their bytes are not a text's.
    tokens = [b"\xff%d" % id for id in range(old.vocab_size)]
    for name, id in old.vocabulary.ids.items():
        if not BYTE_TOKEN.fullmatch(name):
            tokens[id] = old.token_bytes[id]
    tokens += [character.encode() for character in characters]
    symbols = _to_symbols(old, words, counts, {character: old.vocab_size + n for n, character in enumerate(characters)})
    first_merged = len(tokens)
    merges = learn_merges(symbols, tokens, first_merged + num_new_tokens, min_frequency, advance)
    by_use = heapq.merge(
        _character_candidates(characters, min_frequency),
        _merge_candidates(merges, tokens, first_merged),
        key=lambda candidate: -candidate.saved,
    )
    taken = {*old.vocabulary.ids, *old.special_ids}
    names = (candidate.token.decode().replace(" ", SPACE_MARK) for candidate in by_use)
    pieces = [name for name in names if name not in taken][:num_new_tokens]
    return pieces, extended_merges(old, pieces)


def _missing_characters(old: Tokenizer, words: list[str], counts: Counts) -> Counter[str]:
    """How often each character occurs that the vocabulary does not have."""
    missing: Counter[str] = Counter()
    for word, count in zip(words, counts.tolist(), strict=True):
        for character in word.replace(" ", SPACE_MARK):
            if character not in old.vocabulary.ids:
                missing[character] += count
    return missing


def _to_symbols(old: Tokenizer, words: list[str], counts: Counts, missing: dict[str, int]) -> Words:
    """Words as the old tokenizer encodes them, with one symbol instead of the bytes of a missing character."""
    byte_values = {id: byte for byte, id in enumerate(old.vocabulary.byte_ids)}
    symbols: list[int] = []
    lengths = []
    for ids in old.continuation.encode(words):
        before, held = len(symbols), bytearray()
        for id in ids.tolist():
            if id not in byte_values:
                symbols.append(id)
                continue
            held.append(byte_values[id])
            if (character := missing.get(held.decode("utf-8", "ignore"))) is not None:
                symbols.append(character)
                held.clear()
        lengths.append(len(symbols) - before)
    return new_words(np.array(symbols, np.int32), np.array(lengths, np.int64), counts)


def _character_candidates(characters: Counter[str], min_frequency: int) -> list[_Candidate]:
    candidates = [
        _Candidate(count * max(1, len(character.encode()) - 1), character.encode())
        for character, count in characters.items()
        if count >= min_frequency
    ]
    return sorted(candidates, key=lambda candidate: (-candidate.saved, candidate.token))


def _merge_candidates(merges: list[Merge], tokens: list[bytes], first_merged: int) -> Iterator[_Candidate]:
    """In the order of merges: a token comes after its parts, also where a second way to make a part has made it more
    frequent since."""
    saved, seen = 1 << 62, set(tokens[:first_merged])
    for merge in merges:
        saved = min(saved, merge.frequency)
        token = tokens[merge.left] + tokens[merge.right]
        if token not in seen:
            seen.add(token)
            yield _Candidate(saved, token)


def extended_merges(old: Tokenizer, pieces: list[str]) -> list[list[str]]:
    """All merges: merges of new pieces follow the old ones; an old piece that can be made of new ones too keeps its
    rank. So the ids equal sentencepiece's, which joins whatever becomes a piece, the best piece first."""
    merges = old.vocabulary.merges
    old_pieces = [name for name in old.vocabulary.ids if not BYTE_TOKEN.fullmatch(name)]
    known, new = {*old_pieces, *pieces}, set(pieces)
    ranked: list[tuple[float, list[str]]] = list(enumerate(merges))
    for rank, piece in enumerate(pieces, len(merges)):
        ranked += [(rank, merge) for merge in piece_merges(piece, known)]
    ranks = {left + right: rank + 0.5 for rank, (left, right) in enumerate(merges)}
    for piece in old_pieces:
        rank_after = ranks.get(piece, len(merges) + len(pieces))  # none: nothing could make it before
        ranked += [(rank_after, merge) for merge in piece_merges(piece, known) if new.intersection(merge)]
    return [merge for _, merge in sorted(ranked, key=lambda entry: entry[0])]


def extended_model(path: Path, old: Tokenizer, new: Tokenizer) -> bytes:
    """The old ``tokenizer.model`` with the new tokens, for programs that read that."""
    data = path.read_bytes()
    model = parse_model(path, data)
    names = {id: name for name, id in {**new.vocabulary.ids, **new.special_ids}.items()}
    if [piece.text for piece in model.pieces] != [names.get(id) for id in range(old.vocab_size)]:
        raise Z2aError(f"{path} is not the model of the tokenizer.json beside it: remove it, or import it again")
    score = np.float32(min(piece.score for piece in model.pieces if piece.type == PieceType.NORMAL))
    special, added = set(new.special_ids.values()), []
    for id in range(old.vocab_size, new.vocab_size):
        if id in special:
            added.append(SentencePiece(names[id], 0.0, PieceType.CONTROL))
            continue
        # Below all others, also where a float is too coarse for a difference of 1.
        score = min(score - np.float32(1), np.nextafter(score, np.float32(-np.inf)))
        added.append(SentencePiece(names[id], float(score)))
    return append_pieces(data, added, new.vocab_size)
