"""Deduplication: exact and near duplicates, boilerplate lines, and text of evaluation sets.

Every step is a plain function from paths to paths and counts, so that it can run as one task anywhere; steps that need
all documents at once are shuffles through files, one partition per task. ``find_duplicates`` runs
those for complete documents in order.
"""

from zero2all.corpus.dedup.boilerplate import BoilerplateParams, count_lines, strip_boilerplate, write_boilerplate_lines
from zero2all.corpus.dedup.decontaminate import (
    DecontaminationIndex,
    build_decontamination_index,
    find_contamination,
    find_ngrams,
    load_decontamination_index,
    write_contamination_drops,
)
from zero2all.corpus.dedup.drops import collect_shard_drops, read_drops
from zero2all.corpus.dedup.duplicates import find_duplicates, run_locally
from zero2all.corpus.dedup.exact import write_exact_drops, write_exact_keys
from zero2all.corpus.dedup.near import write_near_drops, write_near_links, write_signatures
from zero2all.corpus.dedup.params import DedupParams
from zero2all.corpus.dedup.validation_overlap import (
    build_validation_index,
    write_validation_drops,
    write_validation_signatures,
)

__all__ = [
    "BoilerplateParams",
    "DecontaminationIndex",
    "DedupParams",
    "build_decontamination_index",
    "build_validation_index",
    "collect_shard_drops",
    "count_lines",
    "find_contamination",
    "find_duplicates",
    "find_ngrams",
    "load_decontamination_index",
    "read_drops",
    "run_locally",
    "strip_boilerplate",
    "write_boilerplate_lines",
    "write_contamination_drops",
    "write_exact_drops",
    "write_exact_keys",
    "write_near_drops",
    "write_near_links",
    "write_signatures",
    "write_validation_drops",
    "write_validation_signatures",
]
