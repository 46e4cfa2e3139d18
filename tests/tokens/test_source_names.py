"""Sources whose names are no file names, or the same one: each keeps its own shards and its name as written."""

from __future__ import annotations

import json
from pathlib import Path

from zero2all.corpus import build_corpus
from zero2all.recipe import CorpusRecipe, SourceRecipe, TokensRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import PackedDataset, TokenStore, build_tokens

NAMES = ["zh", "三国演义", "三国", "v1.0", "v1.1", "News", "news", "Café", "a b", "..", "[red]", "红" * 180]


def test_every_source_has_its_own_tokens_under_its_own_name(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    sources = []
    for number, name in enumerate(NAMES):
        raw = tmp_path / "raw" / f"{number}.jsonl"
        raw.write_text(json.dumps({"text": " ".join(f"word {number * step}" for step in range(80))}))
        sources.append(SourceRecipe(name=name, paths=[str(raw)]))
    documents = tmp_path / "documents"
    build_corpus(CorpusRecipe(sources=sources, filters=[], holdout=0), documents)
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
