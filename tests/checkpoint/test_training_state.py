"""The JSON records of checkpoints and runs."""

from __future__ import annotations

import pytest

from zero2all.checkpoint.checkpoint_store import CheckpointHeader
from zero2all.errors import Z2aError
from zero2all.records import parse_record


def test_a_header_needs_no_key_and_ignores_unknown_ones() -> None:
    assert parse_record(CheckpointHeader, {"step": 1, "new": {}}, "state.json") == CheckpointHeader()
    with pytest.raises(Z2aError, match="lineage"):
        parse_record(CheckpointHeader, {"lineage": []}, "state.json")
