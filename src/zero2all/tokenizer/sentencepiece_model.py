"""Read, convert and extend a ``.model`` file of sentencepiece, a protobuf message, without the package that made it.

The file is of unknown origin: every length is checked before it is used, nothing in it is executed, and a model whose
text would not survive a round trip is an error. Our encoder and every consumer of Hugging Face's format read it as
``tokenizer.json``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from zero2all.base.errors import Z2aError
from zero2all.base.io import read_regular
from zero2all.tokenizer.tokenizer_json import SPACE_MARK, Json, byte_token

MODEL_FILE = "tokenizer.model"
MAX_FILE_BYTES = 256 << 20
MAX_PIECE_CHARACTERS = 256  # ways to split a piece grow with its length
VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5  # wire types

# Numbers of fields in sentencepiece_model.proto.
PIECES, TRAINER_SPEC, NORMALIZER_SPEC = 1, 2, 3  # of the model
TEXT, SCORE, TYPE = 1, 2, 3  # of a piece
MODEL_TYPE, VOCAB_SIZE, SPACE_AS_SUFFIX, BYTE_FALLBACK = 3, 4, 24, 35  # of its trainer
TOKEN_NAMES = {
    "unk_token": (45, "<unk>"),
    "bos_token": (46, "<s>"),
    "eos_token": (47, "</s>"),
    "pad_token": (48, "<pad>"),
}
CHARACTER_MAP, DUMMY_PREFIX, REMOVE_SPACES, ESCAPE_SPACES = 2, 3, 4, 5  # of its normalizer
ALGORITHMS: dict[int, Literal["unigram", "bpe"]] = {1: "unigram", 2: "bpe"}
Fields = dict[int, int | bytes]


class PieceType(IntEnum):
    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True)
class SentencePiece:
    text: str
    score: float
    type: PieceType = PieceType.NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """What a model does with text."""

    pieces: list[SentencePiece]
    """The pieces by id."""
    algorithm: Literal["unigram", "bpe"]
    dummy_prefix: bool
    """A space is put before each text."""
    named_tokens: dict[str, str]
    """Token names by role, such as ``eos_token``."""


def read_model(path: Path) -> SentencePieceModel:
    """Read a ``.model`` file; fails with the reason if it cannot be used."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise _unusable(path, f"it has {size} bytes, more than a vocabulary can have")
    return parse_model(path, read_regular(path))


def parse_model(path: Path, data: bytes) -> SentencePieceModel:
    """``data`` is what ``path`` holds."""
    pieces: list[SentencePiece] = []
    specs: dict[int, Fields] = {TRAINER_SPEC: {}, NORMALIZER_SPEC: {}}
    try:
        for number, value in _fields(data):
            if number == PIECES:
                pieces.append(_piece(_message(value)))
            elif number in specs:
                specs[number].update(_fields(_message(value)))
        trainer, normalizer = specs[TRAINER_SPEC], specs[NORMALIZER_SPEC]
        names = {role: _text(trainer, number, usual) for role, (number, usual) in TOKEN_NAMES.items()}
    except ValueError as error:
        raise _unusable(path, f"it is damaged or another kind of file ({error})") from error
    algorithm = ALGORITHMS.get(_number(trainer, MODEL_TYPE, 1))
    dummy_prefix = bool(_number(normalizer, DUMMY_PREFIX, 1))
    if algorithm is None:
        raise _unusable(path, "it is neither a BPE nor a unigram model")
    if (problem := next(_problems(pieces, trainer, normalizer, dummy_prefix=dummy_prefix), None)) is not None:
        raise _unusable(path, problem)
    controls = {piece.text for piece in pieces if piece.type in (PieceType.CONTROL, PieceType.UNKNOWN)}
    named = {role: name for role, name in names.items() if name in controls}
    return SentencePieceModel(pieces, algorithm, dummy_prefix, named)


def append_pieces(data: bytes, pieces: Iterable[SentencePiece], vocab_size: int) -> bytes:
    """A model with more pieces: protobuf joins a list from wherever its elements are, so they can follow at the end."""
    added = b"".join(_field(PIECES, _piece_message(piece)) for piece in pieces)
    return data + added + _field(TRAINER_SPEC, _varint_bytes(VOCAB_SIZE << 3 | VARINT) + _varint_bytes(vocab_size))


def _problems(pieces: list[SentencePiece], trainer: Fields, normalizer: Fields, *, dummy_prefix: bool) -> Iterator[str]:
    """Why it cannot be used; the first reason is enough."""
    texts = [piece.text for piece in pieces]
    types = {piece.type for piece in pieces}
    if not texts:
        yield "it has no pieces"
    if len(set(texts)) < len(texts):
        yield "two pieces are the same"
    if not all(math.isfinite(piece.score) for piece in pieces):
        yield "the score of a piece is not a number"
    if any(not text or len(text) > MAX_PIECE_CHARACTERS or " " in text for text in texts):
        yield f"a piece is empty, has more than {MAX_PIECE_CHARACTERS} characters or contains a space"
    if {piece.text for piece in pieces if piece.type == PieceType.BYTE} != {byte_token(byte) for byte in range(256)}:
        yield "it has no byte fallback: characters that it does not have would be lost"
    if PieceType.UNUSED in types:
        yield "it has unused pieces"
    if PieceType.USER_DEFINED in types and dummy_prefix:
        # Hugging Face finds such symbols before the space is put, sentencepiece after it.
        yield "it has user-defined symbols and puts a space before a text"
    if normalizer.get(CHARACTER_MAP):
        yield "it normalizes characters, so text would not decode to itself"
    if _number(normalizer, REMOVE_SPACES, 1):
        yield "it removes repeated spaces, so code would lose its indentation"
    if not _number(normalizer, ESCAPE_SPACES, 1) or _number(trainer, SPACE_AS_SUFFIX, 0):
        yield f"it does not write a space as {SPACE_MARK} before a word"


def _piece(message: bytes) -> SentencePiece:
    fields = dict(_fields(message))
    score = fields.get(SCORE, b"\0\0\0\0")
    if not isinstance(score, bytes) or len(score) != 4:
        raise ValueError("the score of a piece is no float")
    type = PieceType(_number(fields, TYPE, PieceType.NORMAL))
    return SentencePiece(_text(fields, TEXT, ""), struct.unpack("<f", score)[0], type)


def _piece_message(piece: SentencePiece) -> bytes:
    score = _varint_bytes(SCORE << 3 | FIXED32) + struct.pack("<f", piece.score)
    return _field(TEXT, piece.text.encode()) + score + _varint_bytes(TYPE << 3 | VARINT) + _varint_bytes(piece.type)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: numbers, and the bytes of anything else."""
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == VARINT:
            value, position = _read_varint(data, position)
            yield number, value
            continue
        if wire_type == LENGTH_DELIMITED:
            size, position = _read_varint(data, position)
        elif wire_type in (FIXED32, FIXED64):
            size = 4 if wire_type == FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire_type} at byte {position}")
        if size > len(data) - position:
            raise ValueError(f"it ends inside a field at byte {position}")
        yield number, data[position : position + size]
        position += size


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a number is too long at byte {position}")


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, message: bytes) -> bytes:
    return _varint_bytes(number << 3 | LENGTH_DELIMITED) + _varint_bytes(len(message)) + message


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message belongs")
    return value


def _number(fields: Fields, number: int, usual: int) -> int:
    value = fields.get(number, usual)
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value


def _text(fields: Fields, number: int, usual: str) -> str:
    value = fields.get(number)
    return usual if value is None else _message(value).decode()  # UnicodeDecodeError is a ValueError


def _unusable(path: Path, why: str) -> Z2aError:
    return Z2aError(f"{path} is not a sentencepiece model that can be used: {why}")


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


def added_token(id: int, name: str, *, special: bool) -> Json:
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
