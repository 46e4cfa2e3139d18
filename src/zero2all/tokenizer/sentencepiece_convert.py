"""A sentencepiece model as ``tokenizer.json``, which our encoder and every consumer of Hugging Face's format read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zero2all.tokenizer.sentencepiece_model import PieceType, SentencePieceModel
from zero2all.tokenizer.text_vocabulary import SPACE_MARK, Json

SPECIAL_TYPES = (PieceType.UNKNOWN, PieceType.CONTROL)


def to_tokenizer_json(model: SentencePieceModel) -> Json:
    """The definition that gives the ids of sentencepiece."""
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prepend = [{"type": "Prepend", "prepend": SPACE_MARK}] if model.dummy_prefix else []
    replace_marks = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if model.dummy_prefix else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(id, piece.text, special=piece.type in SPECIAL_TYPES)
            for id, piece in enumerate(model.pieces)
            if piece.type in (*SPECIAL_TYPES, PieceType.USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace_spaces]},
        "pre_tokenizer": _unigram_pre_tokenizer() if model.algorithm == "unigram" else None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [replace_marks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _unigram(model) if model.algorithm == "unigram" else _bpe(model),
    }


def added_token(id: int, name: str, special: bool) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": id, "content": name, **flags}


def _unknown_id(model: SentencePieceModel) -> int | None:
    return next((id for id, piece in enumerate(model.pieces) if piece.type == PieceType.UNKNOWN), None)


def _unigram(model: SentencePieceModel) -> Json:
    return {
        "type": "Unigram",
        "unk_id": _unknown_id(model),
        "vocab": [[piece.text, piece.score] for piece in model.pieces],
        "byte_fallback": True,
    }


def _unigram_pre_tokenizer() -> Json:
    """Splits the text ``<0x41>`` after its first character: Hugging Face's unigram model would take it for a byte."""
    pattern = {"Regex": "<(?=0x[0-9A-F]{2}>)"}
    return {"type": "Split", "pattern": pattern, "behavior": "MergedWithPrevious", "invert": False}


def _bpe(model: SentencePieceModel) -> Json:
    unknown = _unknown_id(model)
    text = {id: piece for id, piece in enumerate(model.pieces) if piece.type == PieceType.NORMAL}
    by_score = sorted(text, key=lambda id: (-text[id].score, id))
    known = {piece.text: id for id, piece in text.items()}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else model.pieces[unknown].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {piece.text: id for id, piece in enumerate(model.pieces)},
        "merges": [merge for id in by_score for merge in piece_merges(text[id].text, known)],
    }


def piece_merges(piece: str, known: Mapping[str, Any] | Iterable[str]) -> list[list[str]]:
    """All merges that make a piece: sentencepiece joins two neighbours whenever the result is a piece."""
    splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
    return [[left, right] for left, right in splits if left in known and right in known]
