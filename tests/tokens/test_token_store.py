from __future__ import annotations

import json
import struct
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.base.tasks import TaskEngine
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenShard, TokenStore, build_tokens
from zero2all.tokens.token_store import DOCS_SCHEMA, DocumentInfo, TokenShardWriter


def read_megatron(prefix: Path) -> list[list[int]]:
    """A reader written from Megatron's published format alone; it shares no code with the store."""
    sizes = {1: "B", 2: "b", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
    data = (prefix.parent / (prefix.name + ".idx")).read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<Q", data, 9) == (1,)
    (code,) = struct.unpack_from("<B", data, 17)
    sequences, documents = struct.unpack_from("<QQ", data, 18)
    offset = 34
    lengths = struct.unpack_from(f"<{sequences}i", data, offset)
    offset += 4 * sequences
    pointers = struct.unpack_from(f"<{sequences}q", data, offset)
    offset += 8 * sequences
    bounds = struct.unpack_from(f"<{documents}q", data, offset)
    assert offset + 8 * documents == len(data)
    tokens = (prefix.parent / (prefix.name + ".bin")).read_bytes()
    width = np.dtype(sizes[code]).itemsize
    read = [
        np.frombuffer(tokens, sizes[code], n, pointer).tolist() for n, pointer in zip(lengths, pointers, strict=True)
    ]
    assert sum(lengths) * width == len(tokens)
    return [list(chain(*read[first:last])) for first, last in pairwise(bounds)]


def test_an_independent_megatron_reader_finds_every_document(workspace: Path) -> None:
    tokenizer = Tokenizer(workspace / "tokenizer")
    for split in ("train", "valid"):
        for parquet in sorted((workspace / "documents" / split).glob("*.parquet")):
            texts = pq.read_table(parquet)["content"].to_pylist()
            documents = read_megatron(workspace / "tokens" / split / parquet.stem)
            assert [ids[-1] for ids in documents] == [tokenizer.eos_token_id] * len(texts)
            assert [tokenizer.decode(ids[:-1]) for ids in documents] == texts


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_600, "int32")])
def test_ids_past_16_bits_are_stored_in_a_type_megatron_knows(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    document_rows = pa.RecordBatch.from_pylist([vars(DocumentInfo("g", "s", "t", 5))] * 3, schema=DOCS_SCHEMA)
    with TokenShardWriter(tmp_path / "a", vocab_size) as writer:
        assert (
            writer.write(document_rows, [np.array([0, 1, vocab_size - 1]), np.array([7]), np.array([])], end_of_text=2)
            == 7
        )
    assert TokenShard(tmp_path / "a").tokens.dtype == dtype
    assert read_megatron(tmp_path / "a") == [[0, 1, vocab_size - 1, 2], [7, 2], [2]]


def test_provenance_names_the_document_of_every_token(workspace: Path) -> None:
    for source, shards in TokenStore(workspace / "tokens", "train").sources.items():
        rows = pq.read_table(workspace / "documents" / "train" / f"{source}-00000.parquet").to_pylist()
        shard = shards[0]
        for number, row in enumerate(rows):
            first, last = int(shard.document_offsets[number]), int(shard.document_offsets[number + 1])
            assert shard.documents_between(first, last) == range(number, number + 1)
            assert shard.documents_between(max(0, first - 1), last)[-1] == number
            assert shard.document_info(number) == DocumentInfo(
                row["gid"], row["data_src"], row["title"], len(row["content"].encode())
            )


def test_a_rerun_encodes_only_what_changed(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace)

    def build() -> bool:
        return build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, tmp_path).reused

    assert not build()
    assert build()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "train").glob("*.bin")}
    damaged = tmp_path / "train" / "zh-00000.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"\x00\x00")
    assert not build()
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "train").glob("*.bin")}
    assert {name for name in before if before[name] != after[name]} == {"zh-00000.bin"}
    assert damaged.read_bytes() == (workspace / "tokens" / "train" / "zh-00000.bin").read_bytes()


def test_an_unfinished_store_is_not_read_and_a_rebuild_removes_stale_files(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(workspace)

    def build() -> None:
        build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, tmp_path)

    build()
    (tmp_path / "train" / "gone-00000.bin").write_bytes(b"of a source that is no more")
    (tmp_path / "train" / "zh-00000.bin").write_bytes(b"damaged")
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_split", lambda self, backend, rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build()
    with pytest.raises(Z2aError, match="z2a tokens build"):
        TokenStore(tmp_path, "train")
    build()
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == sorted(
        path.name for path in (workspace / "tokens" / "train").iterdir()
    )


def test_a_wrong_encoding_is_never_published(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tokenizer.encode_split

    def wrong_unless_reference(self: Tokenizer, backend: Any, rows: Any) -> list[Any]:
        encoded = original(self, backend, rows)
        return encoded if backend is self.reference else [[*ids[:-1], 5] for ids in encoded]

    monkeypatch.setattr(Tokenizer, "encode_split", wrong_unless_reference)
    recipe = tiny_recipe(workspace)
    with pytest.raises(Z2aError, match="disagree"):
        build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, tmp_path)
    assert not list(tmp_path.rglob("[a-z]*.bin"))  # files of a killed or failed build begin with a dot
    with pytest.raises(Z2aError, match="not finished"):
        TokenStore(tmp_path, "train")


def test_the_number_of_workers_changes_no_byte(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, tmp_path, TaskEngine(workers=2))
    built, expected = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path, workspace / "tokens")
    )
    assert built == expected


def test_the_validation_split_needs_a_full_sequence(workspace: Path) -> None:
    store = TokenStore(workspace / "tokens", "valid")
    longest = max(sum(tokens) for tokens in store.shard_tokens.values())
    store.require_full_sequence(longest - 1)
    with pytest.raises(Z2aError, match=r"raise corpus\.holdout"):
        store.require_full_sequence(longest)


def test_manifest_counts_tokens_by_source(workspace: Path) -> None:
    manifest = json.loads((workspace / "tokens" / "manifest.json").read_text())
    for split in ("train", "valid"):
        store = TokenStore(workspace / "tokens", split)
        for source, entry in manifest["splits"][split].items():
            assert entry["tokens"] == sum(len(shard.tokens) for shard in store.sources[source])
    assert manifest["tokenizer"] == Tokenizer(workspace / "tokenizer").fingerprint
