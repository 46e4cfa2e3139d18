"""New tokens of a sentencepiece BPE vocabulary, as ``z2a tokenizer extend`` adds them to LLaMA's.

A character that the vocabulary does not have is encoded as its bytes. So there are two kinds of new tokens: such
characters, and pairs of tokens. Both are chosen by how many tokens of the text they save.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.errors import Z2aError
from zero2all.tokenizer.merge import Merge, learn_merges
from zero2all.tokenizer.pair_index import Words, new_words
from zero2all.tokenizer.sentencepiece_model import Piece, PieceType, append_pieces, parse_model, piece_merges
from zero2all.tokenizer.text_vocabulary import BYTE_TOKEN, SPACE_MARK
from zero2all.tokenizer.tokenizer import Tokenizer

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
    # No merge may make a token that is not text, or a byte: their bytes are not those of a text.
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
    """All merges: those of new pieces follow the old ones; an old piece that can be made of new ones too keeps its
    rank. So the ids are those of sentencepiece, which joins whatever becomes a piece, the best piece first."""
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
            added.append(Piece(names[id], 0.0, PieceType.CONTROL))
            continue
        # Below all others, also where a float is too coarse for a difference of 1.
        score = min(score - np.float32(1), np.nextafter(score, np.float32(-np.inf)))
        added.append(Piece(names[id], float(score)))
    return append_pieces(data, added, new.vocab_size)
