"""Copies out of a corpus: exact, near, lines that documents share, and text of evaluation sets.

Every step is a plain function from paths to paths and counts, so that it can run as one task anywhere; steps that need
to see everything at once are shuffles through files, one partition a task. ``find_copies`` strings
those for whole documents together.
"""

from zero2all.corpus.dedup.decontaminate import Index, build_index, contaminated, contamination_drops, load_index
from zero2all.corpus.dedup.drops import read_drops, shard_drops
from zero2all.corpus.dedup.exact import exact_keys, exact_partition
from zero2all.corpus.dedup.near import connected_components, near_drops, near_partition, near_signatures
from zero2all.corpus.dedup.paragraphs import LineParams, boilerplate_partition, line_counts, strip_boilerplate
from zero2all.corpus.dedup.params import DedupParams
from zero2all.corpus.dedup.run import find_copies, run_here
from zero2all.corpus.dedup.validation import index_validation, sign_validation, validation_drops

__all__ = [
    "DedupParams",
    "Index",
    "LineParams",
    "boilerplate_partition",
    "build_index",
    "connected_components",
    "contaminated",
    "contamination_drops",
    "exact_keys",
    "exact_partition",
    "find_copies",
    "index_validation",
    "line_counts",
    "load_index",
    "near_drops",
    "near_partition",
    "near_signatures",
    "read_drops",
    "run_here",
    "shard_drops",
    "sign_validation",
    "strip_boilerplate",
    "validation_drops",
]
