"""Raw files to documents: Parquet shards in one schema, a separate validation split, everything skipped counted."""

from zero2all.corpus.build import build_corpus, recommended_workers
from zero2all.corpus.document import SCHEMA, Document
from zero2all.corpus.manifest import BuiltCorpus, summary_lines

__all__ = ["SCHEMA", "BuiltCorpus", "Document", "build_corpus", "recommended_workers", "summary_lines"]
