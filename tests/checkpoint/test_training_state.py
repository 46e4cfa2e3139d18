"""The JSON records of checkpoints and runs."""

from __future__ import annotations

import pytest

from zero2all.base.errors import Z2aError
from zero2all.base.records import parse_record
from zero2all.checkpoint.checkpoint_directory import CheckpointHeader


def test_a_header_needs_no_key_and_ignores_unknown_ones() -> None:
    assert parse_record(CheckpointHeader, {"step": 1, "new": {}}, "state.json") == CheckpointHeader()
    with pytest.raises(Z2aError, match="lineage"):
        parse_record(CheckpointHeader, {"lineage": []}, "state.json")
