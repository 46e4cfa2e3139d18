from __future__ import annotations

import json
import resource
import struct
import sys
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import tiny_recipe
from tests.corpus.builds import corpus_of, source_of, write_texts
from tests.tokens.test_document_boundaries import write_store
from zero2all.base.errors import Z2aError
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import build_corpus
from zero2all.recipe import TokensRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import PackedDataset, TokenShard, TokenStore, build_tokens, inspect
from zero2all.tokens.inspect import opening_prompts
from zero2all.tokens.manifest import BuiltStore
from zero2all.tokens.token_store import (
    DOCS_SCHEMA,
    MAX_OPEN_INDEXES,
    MAX_OPEN_SHARDS,
    DocumentInfo,
    TokenShardWriter,
    _load_document_index,
    _map_document_offsets,
    _map_tokens,
)


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


def build(workspace: Path, tokens: Path, engine: TaskEngine | None = None) -> BuiltStore:
    recipe = tiny_recipe(workspace)
    return build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, tokens, engine)


def test_a_rerun_encodes_only_what_changed(workspace: Path, tmp_path: Path) -> None:
    assert not build(workspace, tmp_path).reused
    assert build(workspace, tmp_path).reused
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "train").glob("*.bin")}
    damaged = tmp_path / "train" / "zh-00000.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"\x00\x00")
    assert not build(workspace, tmp_path).reused
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "train").glob("*.bin")}
    assert {name for name in before if before[name] != after[name]} == {"zh-00000.bin"}
    assert damaged.read_bytes() == (workspace / "tokens" / "train" / "zh-00000.bin").read_bytes()


def test_an_unfinished_store_is_not_read_and_a_rebuild_removes_stale_files(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(workspace, tmp_path)
    (tmp_path / "train" / "gone-00000.bin").write_bytes(b"of a source that is no more")
    (tmp_path / "train" / "zh-00000.bin").write_bytes(b"damaged")
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_split", lambda self, backend, rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(workspace, tmp_path)
    with pytest.raises(Z2aError, match="z2a tokens build"):
        TokenStore(tmp_path, "train")
    build(workspace, tmp_path)
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == sorted(
        path.name for path in (workspace / "tokens" / "train").iterdir()
    )


def test_a_wrong_encoding_is_never_published(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tokenizer.encode_split

    def wrong_unless_reference(self: Tokenizer, backend: Any, rows: Any) -> list[Any]:
        encoded = original(self, backend, rows)
        return encoded if backend is self.reference else [[*ids[:-1], 5] for ids in encoded]

    monkeypatch.setattr(Tokenizer, "encode_split", wrong_unless_reference)
    with pytest.raises(Z2aError, match="disagree"):
        build(workspace, tmp_path)
    assert not list(tmp_path.rglob("[a-z]*.bin"))  # files of a killed or failed build begin with a dot
    with pytest.raises(Z2aError, match="not finished"):
        TokenStore(tmp_path, "train")


def test_the_number_of_workers_changes_no_byte(workspace: Path, tmp_path: Path) -> None:
    build(workspace, tmp_path, TaskEngine(workers=2))
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


# --- samples


def test_one_epoch_covers_every_token_of_every_shard_once(workspace: Path) -> None:
    dataset = PackedDataset.open(workspace / "tokens", "train", seq_len=32, seed=4)
    rows = dataset.tokens(0, dataset.samples_per_epoch)
    expected = []
    for shards in dataset.store.sources.values():
        tokens = shards[0].tokens
        covered = (len(tokens) - 1) // 32 * 32
        expected += list(map(bytes, tokens[:covered].reshape(-1, 32).astype(np.int64)))
    assert sorted(map(bytes, rows[:, :-1])) == sorted(expected)


def test_the_target_of_the_last_token_is_the_token_that_follows_it(workspace: Path) -> None:
    dataset = PackedDataset.open(workspace / "tokens", "train", seq_len=32)
    sources, sequences = dataset.order.locate(0, 1)
    shard, first, _ = dataset._sequences[dataset.order.names[sources[0]]].token_range(int(sequences[0]))
    assert (dataset.tokens(0, 1)[0] == shard.tokens[first : first + 33]).all()


def test_the_fingerprint_covers_what_the_order_depends_on(workspace: Path) -> None:
    def fingerprint(**changes: object) -> str:
        return PackedDataset.open(workspace / "tokens", **{"split": "train", "seq_len": 32, **changes}).fingerprint  # type: ignore[arg-type]

    assert fingerprint() == fingerprint()
    mixture = {"en": 1.0, "zh": 2.0}
    changes = ({"seed": 5}, {"stage": "x"}, {"seq_len": 16}, {"split": "valid"}, {"mixture": mixture})
    assert len({fingerprint(), *(fingerprint(**one) for one in changes)}) == 6


def test_documents_account_for_every_token(workspace: Path) -> None:
    dataset = PackedDataset.open(workspace / "tokens", "train", seq_len=32)
    for sample in range(40):
        spans = dataset.documents(sample, sample + 1)
        assert sum(span.tokens for span in spans) == 33
        tokens = dataset.tokens(sample, sample + 1)[0]
        offset = 0
        for span in spans:
            shard = next(s for s in dataset.store.sources[span.source] if s.stem.name == span.shard)
            start = int(shard.document_offsets[span.document]) + span.first_token
            assert (shard.tokens[start : start + span.tokens] == tokens[offset : offset + span.tokens]).all()
            offset += span.tokens


# --- names of sources

NAMES = ["zh", "三国演义", "三国", "v1.0", "v1.1", "News", "news", "Café", "a b", "..", "[red]", "红" * 180]


def test_every_source_has_its_own_tokens_under_its_own_name(workspace: Path, tmp_path: Path) -> None:
    sources = []
    for number, name in enumerate(NAMES):
        text = " ".join(f"word {number * step}" for step in range(80))
        sources.append(source_of(write_texts(tmp_path / f"{number}.jsonl", [text]), name))
    documents = tmp_path / "documents"
    build_corpus(corpus_of(*sources), documents)
    for _ in range(2):  # a second build keeps every shard
        built = build_tokens(TokensRecipe(), documents, workspace / "tokenizer", tmp_path / "tokens")
    assert built.reused
    assert list(built.splits["train"]) == NAMES
    stems = [shard for source in built.splits["train"].values() for shard in source.shards]
    assert len({stem.lower() for stem in stems}) == len(NAMES)
    assert stems[0] == "zh-00000"

    store, tokenizer = TokenStore(tmp_path / "tokens", "train"), Tokenizer(workspace / "tokenizer")
    for number, (name, (shard,)) in enumerate(store.sources.items()):
        text = tokenizer.decode(shard.read(0, len(shard.tokens)))
        assert text.startswith(f"word 0 word {number} "), name
        assert shard.document_info(0).data_src == name
    dataset = PackedDataset(store, seq_len=32, mixture={"三国": 1, "v1.1": 1})
    assert {span.source for span in dataset.documents(0, 8)} == {"三国", "v1.1"}


# --- prompts of samples


def shard(*documents: list[int]) -> Any:
    offsets = np.cumsum([0, *map(len, documents)])
    return SimpleNamespace(document_offsets=offsets, tokens=np.array([token for one in documents for token in one]))


def open_stores(monkeypatch: pytest.MonkeyPatch, valid: dict[str, Any], train: dict[str, Any]) -> Any:
    stores = {"valid": SimpleNamespace(sources=valid), "train": SimpleNamespace(sources=train)}
    monkeypatch.setattr(inspect, "TokenStore", lambda directory, split: stores[split])
    return SimpleNamespace(special_ids={"<end>": 0}, decode=lambda ids: " ".join(map(str, ids)))


def test_a_source_without_validation_documents_gives_a_training_one(monkeypatch: pytest.MonkeyPatch) -> None:
    train = {name: [shard([first, first, 0])] for name, first in (("book", 1), ("notes", 2), ("records", 3))}
    tokenizer = open_stores(
        monkeypatch, {"book": [], "notes": [shard()], "records": [shard([7, 7, 0], [8, 8, 0])]}, train
    )
    assert opening_prompts(Path(), tokenizer, 3) == ["1 1", "2 2", "7 7"]
    assert opening_prompts(Path(), tokenizer, 4) == ["1 1", "2 2", "7 7", "8 8"]


def test_more_sources_than_prompts_give_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    train = {str(number): [shard([number, 0])] for number in range(1, 6)}
    tokenizer = open_stores(monkeypatch, {}, train)
    assert opening_prompts(Path(), tokenizer, 3) == ["1", "2", "3", "4", "5"]


# --- more shards than a process may have open

SHARDS = 300


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    write_store(root, {"s": ("text", [[[number % 256] * 64] for number in range(SHARDS)])}, vocab_size=320)
    return root


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Enough for the shards that may be open, with their masks and offsets, and too few for all of them."""
    for cache in (_map_tokens, _map_document_offsets, _load_document_index):
        cache.cache_clear()  # shards of earlier tests
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 3 * MAX_OPEN_SHARDS + 32, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_shards_beyond_the_descriptor_limit_are_read_and_released(many_shards: Path) -> None:
    dataset = PackedDataset(TokenStore(many_shards, "train"), 32, document_mask=True)
    seen = set()
    for first in range(0, dataset.samples_per_epoch, 8):
        seen |= {int(row[0]) for row in dataset.tokens(first, min(first + 8, dataset.samples_per_epoch))}
    assert len(seen) == 256
    assert mapped_files(many_shards, ".bin") <= MAX_OPEN_SHARDS
    assert mapped_files(many_shards, ".idx") <= MAX_OPEN_SHARDS


@pytest.mark.usefixtures("few_descriptors")
def test_documents_of_shards_beyond_the_descriptor_limit_are_named(many_shards: Path) -> None:
    dataset = PackedDataset(TokenStore(many_shards, "train"), 32)
    gids = {span.gid for span in dataset.documents(0, dataset.samples_per_epoch)}
    assert len(gids) == SHARDS
    assert mapped_files(many_shards, ".docs.arrow") <= MAX_OPEN_INDEXES


def mapped_files(store: Path, suffix: str) -> int:
    """How many files of the store this process has mapped; only Linux says it."""
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-1] for line in lines if str(store) in line and line.endswith(suffix)})
