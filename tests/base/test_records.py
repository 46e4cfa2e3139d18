from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from zero2all.base.errors import Z2aError
from zero2all.base.io import read_record, sha256_file, write_record
from zero2all.base.manifest import read_finished
from zero2all.base.records import parse_record


@dataclass(frozen=True)
class Shard:
    name: str
    bytes: int


@dataclass(frozen=True)
class Store:
    shards: tuple[Shard, ...]
    seed: int | None = None
    sources: dict[str, int] = field(default_factory=dict)


def test_nested_records_with_unknown_and_missing_keys(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_text('{"shards": [{"name": "床", "bytes": 3, "added later": 1}]}', encoding="utf-8")
    assert read_record(Store, path) == Store(shards=(Shard("床", 3),))


def test_an_error_names_the_file_and_the_field(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    for text, message in (
        ('{"shards": [{"name": "a"}]}', "shards.0.bytes: Field required"),
        ('{"shards": [{"name": "a", "bytes": "many"}]}', "shards.0.bytes: Input should be a valid integer"),
        ("[]", "content: Input should be a dictionary"),
        ('{"shards": ', "is damaged"),
    ):
        path.write_text(text)
        with pytest.raises(Z2aError, match=message) as raised:
            read_record(Store, path)
        assert str(path) in str(raised.value)


def test_a_value_is_not_parsed_as_code() -> None:
    with pytest.raises(Z2aError):
        parse_record(Store, "Store(shards=())", "a string")


@dataclass(frozen=True)
class Part:
    key: str
    sha256: str


def test_output_is_finished_while_its_record_has_the_key_and_matches_its_file(tmp_path: Path) -> None:
    data, path = tmp_path / "part.bin", tmp_path / "part.json"

    def finished(key: str = "this") -> Part | None:
        return read_finished(Part, path, key, lambda part: part.sha256 == sha256_file(data))

    data.write_bytes(b"abc")
    assert finished() is None  # killed before its record was written
    write_record(path, Part("this", sha256_file(data)))
    assert finished() == Part("this", sha256_file(data))
    assert finished("other") is None

    data.write_bytes(b"abd")
    assert finished() is None
    data.unlink()
    assert finished() is None

    data.write_bytes(b"abc")
    for text in (b"", b"\xff", b"[]", b'{"key": "this"}'):
        path.write_bytes(text)
        assert finished() is None


def test_a_store_that_fails_does_not_make_output_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bytes:
        raise Z2aError("the store failed")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(Z2aError, match="the store failed"):
        read_finished(Part, tmp_path / "part.json", "this")
