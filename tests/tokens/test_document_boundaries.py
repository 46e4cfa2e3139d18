"""Where documents start in a sample: as the store says, whatever their tokens are."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import zero2all
from zero2all.base.conversation import SourceKind
from zero2all.base.errors import Z2aError
from zero2all.evals.scored_text import EvalText, Packed, read_stream
from zero2all.model import document_starts
from zero2all.recipe.objective import Conversations
from zero2all.tokens import PackedDataset, TokenStore
from zero2all.tokens.token_store import DOCS_SCHEMA, DocumentInfo, TokenShard, TokenShardWriter

EOS, SEQ_LEN = 3, 16
Documents = list[list[int]]


def make_documents(rng: random.Random, count: int, longest: int, inside: bool) -> Documents:
    """Some have no token; with ``inside`` a third of all tokens are the one that also ends documents."""
    other = [4, 5, 6, 7]
    return [
        [EOS if inside and rng.random() < 0.3 else rng.choice(other) for _ in range(rng.randint(0, longest))]
        for _ in range(count)
    ]


def write_store(
    root: Path, sources: dict[str, tuple[SourceKind, list[Documents]]], vocab_size: int = 100
) -> TokenStore:
    """Each source of some shards; of a conversation, every token but the first is of the assistant."""
    entries = {}
    (root / "train").mkdir(parents=True)
    for name, (kind, shards) in sources.items():
        sizes = []
        for number, documents in enumerate(shards):
            infos = [vars(DocumentInfo(f"{number:016x}{n:016x}", "", "", 1)) for n in range(len(documents))]
            rows = pa.RecordBatch.from_pylist(infos, schema=DOCS_SCHEMA)
            stem = root / "train" / f"{name}-{number}"
            with TokenShardWriter(stem, vocab_size, with_mask=kind != "text") as writer:
                masks = [np.ones(len(document)) for document in documents] if kind != "text" else None
                sizes.append(writer.write(rows, [np.array(document) for document in documents], EOS, masks))
        names = [f"{name}-{number}" for number in range(len(shards))]
        entries[name] = {
            "documents": 1, "tokens": sum(sizes), "bytes": 1, "shards": names, "shard_tokens": sizes, "kind": kind,
            "sha256": ["0"] * len(names), "records": ["0"] * len(names),
        }  # fmt: skip
    manifest = {"kind": "tokens", "format": 2, "tokenizer": "x", "vocab_size": vocab_size, "documents_key": "x",
                "splits": {"train": entries}, "tokens": 1, "bytes": 1}  # fmt: skip
    (root / "manifest.json").write_text(json.dumps(manifest))
    return TokenStore(root, "train")


def expected_starts(documents: Documents, first: int, end_of_text_first: bool) -> list[int]:
    """Of the inputs of a sequence, by the document that each token of the shard belongs to."""
    owners = [number for number, document in enumerate(documents) for _ in range(len(document) + 1)]
    if end_of_text_first:  # the last token of a document is what the next one starts with
        owners = [*owners[1:], len(documents)]
    owners = owners[first : first + SEQ_LEN]
    return [owners.index(owner) for owner in owners]


def read_starts(dataset: PackedDataset, sample: int) -> list[int]:
    samples = dataset.read(sample, sample + 1)
    assert samples.is_first is not None
    starts: list[int] = document_starts(torch.from_numpy(samples.is_first[:, :-1]))[0].tolist()
    return starts


@pytest.mark.parametrize("inside", [False, True], ids=["ends only", "inside too"])
@pytest.mark.parametrize("conversations", ["cut", "packed"])
def test_sequences_of_text_have_the_boundaries_of_the_store(
    tmp_path: Path, conversations: Conversations, inside: bool
) -> None:
    """Also where a sequence starts in the middle of a document, and in samples read in any order."""
    rng = random.Random(7)
    shards = [make_documents(rng, count, 40, inside) for count in (30, 1, 25)]
    store = write_store(tmp_path / "store", {"text": ("text", shards)})
    dataset = PackedDataset(store, SEQ_LEN, conversations=conversations, document_mask=True)
    sizes = [(sum(len(document) + 1 for document in documents) - 1) // SEQ_LEN for documents in shards]
    samples = list(range(dataset.samples_per_epoch))
    rng.shuffle(samples)
    several = 0
    for sample in samples:
        ((_, sequence),) = dataset.locate(sample, sample + 1)
        shard = next(number for number in range(3) if sequence < sum(sizes[: number + 1]))
        first = (sequence - sum(sizes[:shard])) * SEQ_LEN
        starts = read_starts(dataset, sample)
        assert starts == expected_starts(shards[shard], first, conversations == "cut"), sequence
        several += len(set(starts)) > 1
    assert several > 10


@pytest.mark.parametrize("inside", [False, True], ids=["ends only", "inside too"])
@pytest.mark.parametrize("conversations", ["packed", "padded", "pairs"])
def test_rows_of_conversations_have_the_boundaries_of_the_store(
    tmp_path: Path, conversations: Conversations, inside: bool
) -> None:
    rng = random.Random(8)
    documents = [document or [4, 5] for document in make_documents(rng, 60, 7, inside)]
    kind: SourceKind = "preference" if conversations == "pairs" else "chat"
    store = write_store(tmp_path / "store", {"chat": (kind, [documents[:40], documents[40:]])})
    dataset = PackedDataset(store, SEQ_LEN, conversations=conversations)
    widest = 0
    for sample in range(dataset.samples_per_epoch):
        spans, expected = dataset.documents(sample, sample + 1), []
        for span in spans:
            expected += [len(expected)] * span.tokens
        expected += range(len(expected), SEQ_LEN + 1)  # a token of padding sees itself
        assert read_starts(dataset, sample) == expected[:SEQ_LEN]
        widest = max(widest, len(spans))
    assert widest == 1 if conversations == "padded" else widest > 2


def test_without_a_mask_no_boundaries_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "store", {"text": ("text", [[[4] * 40]])})
    monkeypatch.delattr(TokenShard, "document_starts")
    assert PackedDataset(store, SEQ_LEN).read(0, 1).is_first is None


@pytest.mark.parametrize("inside", [False, True], ids=["ends only", "inside too"])
@pytest.mark.parametrize("limit", [None, 50])
@pytest.mark.parametrize("end_of_text_first", [True, False])
def test_evaluated_text_has_the_boundaries_of_the_store(
    tmp_path: Path, end_of_text_first: bool, limit: int | None, inside: bool
) -> None:
    documents = make_documents(random.Random(9), 20, 12, inside)
    (shard,) = write_store(tmp_path / "store", {"text": ("text", [documents])}).sources["text"]
    scoring = Packed(SEQ_LEN, document_mask=True, end_of_text_first=end_of_text_first)
    stream = read_stream(EvalText("x", "source", [shard], limit), EOS, scoring)
    if limit is None:
        documents = [[], *documents]  # an end of text stands before the first document
    for row in stream.rows:
        part = slice(row.start, row.start + row.length)
        starts = document_starts(torch.from_numpy(stream.is_first[None, part]))
        assert starts[0].tolist() == expected_starts(documents, row.start, end_of_text_first)[: row.length]


def test_an_index_of_a_different_shard_is_an_error(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", {"text": ("text", [[[4] * 40], [[4] * 30]])})
    one, two = (shard.stem.with_suffix(".idx") for shard in store.sources["text"])
    one.write_bytes(two.read_bytes())
    with pytest.raises(Z2aError, match="does not describe"):
        PackedDataset(store, SEQ_LEN, document_mask=True).read(0, 3)


END_NAMES = ("eos", "end_of_text", "separator")
COMPARING = ("eq", "ne", "equal", "not_equal", "isin")


def compared_with_the_end_of_text(source: str) -> list[int]:
    """Lines that compare something with an id that ends documents."""
    if not any(name in source.lower() for name in END_NAMES):
        return []  # most modules, which need not be parsed

    def names_it(node: ast.AST) -> bool:
        names = (getattr(part, "id", None) or getattr(part, "attr", None) for part in ast.walk(node))
        return any(name is not None and name.lower().startswith(END_NAMES) for name in names)

    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Compare) and names_it(node) and not isinstance(node.ops[0], ast.Is | ast.IsNot))
        or (
            isinstance(node, ast.Call) and getattr(node.func, "attr", "") in COMPARING and any(map(names_it, node.args))
        )
    ]


def test_no_module_finds_documents_by_the_token_that_ends_them() -> None:
    assert compared_with_the_end_of_text("starts = tokens == tokenizer.eos_token_id") == [1]
    assert compared_with_the_end_of_text("ends = np.isin(tokens, [end_of_text])") == [1]
    assert compared_with_the_end_of_text("ends = tokens.eq(eos)") == [1]
    root = Path(zero2all.__file__).parent
    found = {
        f"{path.relative_to(root)}:{line}"
        for path in sorted(root.rglob("*.py"))
        if path.parent.name != "tokenizer"  # which looks for the name of the token
        for line in compared_with_the_end_of_text(path.read_text("utf-8"))
    }
    assert not found, "take boundaries from the store: Samples.is_first, Batch.doc_starts"
