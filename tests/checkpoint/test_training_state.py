"""The JSON records of checkpoints and runs, of this and of earlier versions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from zero2all.checkpoint import RunIdentity, TrainingState
from zero2all.checkpoint.checkpoint_store import CheckpointHeader
from zero2all.checkpoint.flash import SlotHeader
from zero2all.checkpoint.lineage import Branch
from zero2all.errors import Z2aError
from zero2all.io import read_record
from zero2all.recipe.renamed import identity_to_new
from zero2all.records import parse_record

OLD = Path(__file__).parents[1] / "recipe" / "run_of_0_1"


@pytest.mark.parametrize(("record", "name"), [(RunIdentity, "identity.json"), (TrainingState, "state.json")])
def test_files_of_0_1_are_read_whole_and_written_with_keys_in_the_same_order(
    record: type[RunIdentity], name: str
) -> None:
    beside_the_record = ("step", "time", "lineage")
    saved = identity_to_new(json.loads((OLD / name).read_text()))
    saved["stages"] = [{**stage, "settings": {}} for stage in saved["stages"]]  # was added later, as the next ones
    expected = {}
    for key, value in saved.items():
        expected |= {} if key in beside_the_record else {key: value}
        expected |= {"init": None, "settings": {}} if key == "optimizer" else {}
        expected |= {"islands": None} if key == "skipped" else {}
    assert json.dumps(asdict(read_record(record, OLD / name))) == json.dumps(expected)


def test_a_slot_of_0_1_has_the_state_with_the_new_keys() -> None:
    marker = {"step": 12, "lineage": [["a1", 0]], "hash": "ab", "state": json.loads((OLD / "state.json").read_text())}
    header = parse_record(SlotHeader, marker, "slot-0.json")
    assert header.lineage == (Branch("a1", 0),)
    assert header.state == read_record(TrainingState, OLD / "state.json")
    assert header.state is not None
    assert header.state.model["num_hidden_layers"] == 2


def test_a_header_needs_no_key_and_ignores_unknown_ones() -> None:
    assert parse_record(CheckpointHeader, {"step": 1, "new": {}}, "state.json") == CheckpointHeader()
    with pytest.raises(Z2aError, match="lineage"):
        parse_record(CheckpointHeader, {"lineage": []}, "state.json")
