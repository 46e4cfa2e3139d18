"""Raw files to documents: Parquet shards in one schema, held-out text apart, everything left out counted."""

from zero2all.corpus.build import build_corpus, useful_workers
from zero2all.corpus.document import SCHEMA, Document

__all__ = ["SCHEMA", "Document", "build_corpus", "useful_workers"]
