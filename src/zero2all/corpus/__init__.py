"""Raw files to documents: Parquet shards in one schema, a separate validation split, everything skipped counted."""

from zero2all.corpus.build import build_corpus, recommended_workers
from zero2all.corpus.document import SCHEMA, Document

__all__ = ["SCHEMA", "Document", "build_corpus", "recommended_workers"]
