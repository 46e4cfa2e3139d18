"""Files to records, one at a time, in bounded memory. What cannot be read is counted with its reason, never fatal."""

from zero2all.corpus.readers.base import BrokenRecord, LeftOutMember, Limits, Unreadable, WholeFile
from zero2all.corpus.readers.listing import LEAVES, RawFile, list_files
from zero2all.corpus.readers.pieces import in_pieces
from zero2all.corpus.readers.records import read_batches, read_records

__all__ = [
    "LEAVES",
    "BrokenRecord",
    "LeftOutMember",
    "Limits",
    "RawFile",
    "Unreadable",
    "WholeFile",
    "in_pieces",
    "list_files",
    "read_batches",
    "read_records",
]
