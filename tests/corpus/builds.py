"""Corpora of a few files: how they are built, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from zero2all.base.tasks import TaskEngine
from zero2all.corpus import BuiltCorpus, build_corpus
from zero2all.corpus.document import gid_maker
from zero2all.recipe import CorpusRecipe, SourceRecipe

Row = dict[str, Any]


def make_gid(source: str, own_id: str, content: str) -> str:
    return gid_maker(source)(own_id.encode(), content.encode())


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Records as JSON lines."""
    path.write_text("\n".join(json.dumps(one, ensure_ascii=False) for one in records), encoding="utf-8")
    return path


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    return write_lines(path, ({"text": text} for text in texts))


def source_of(path: Path | str, name: str = "s", **options: Any) -> SourceRecipe:
    return SourceRecipe(name=name, paths=[str(path)], **options)


def corpus_of(*sources: SourceRecipe, **options: Any) -> CorpusRecipe:
    """Without filters and without validation text, unless the options say so."""
    return CorpusRecipe(**{"sources": list(sources), "filters": [], "holdout": 0, **options})


def build_source(path: Path | str, out: Path, engine: TaskEngine | None = None, **options: Any) -> BuiltCorpus:
    """Documents of one source with these options of a source."""
    return build_corpus(corpus_of(source_of(path, **options)), out, engine)


def rows_of(documents: Path, split: str = "*") -> list[Row]:
    return [row for path in sorted(documents.glob(f"{split}/*.parquet")) for row in pq.read_table(path).to_pylist()]


def texts_of(documents: Path, split: str = "*") -> list[str]:
    return [row["content"] for row in rows_of(documents, split)]
