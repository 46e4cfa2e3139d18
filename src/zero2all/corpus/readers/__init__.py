"""Files to records, one at a time, in bounded memory. What cannot be read is counted with its reason, never fatal."""

from zero2all.corpus.readers.base import (
    MISSING_REASONS,
    BrokenRecord,
    ReadLimits,
    RecordChunk,
    SkippedMember,
    TextRecord,
    UnreadableFileError,
    UnreadableItemError,
)
from zero2all.corpus.readers.listing import LINK_OUTSIDE_SOURCE, NOT_TAKEN, RawFile, list_files
from zero2all.corpus.readers.reader_process import missing_packages
from zero2all.corpus.readers.records import read_record_chunks, read_records, split_large_file

__all__ = [
    "LINK_OUTSIDE_SOURCE",
    "MISSING_REASONS",
    "NOT_TAKEN",
    "BrokenRecord",
    "RawFile",
    "ReadLimits",
    "RecordChunk",
    "SkippedMember",
    "TextRecord",
    "UnreadableFileError",
    "UnreadableItemError",
    "list_files",
    "missing_packages",
    "read_record_chunks",
    "read_records",
    "split_large_file",
]
