"""Hostile files, one at a time: records, counted refusals or a reason, in bounded time and memory."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from tests.adversarial.bounds import NOISE, measure, survives
from tests.adversarial.hostile_files import COMPLEXITY, LONG_FILES, ODD_FILES, READER_FILES, zip_of
from zero2all.corpus.readers import (
    BrokenRecord,
    RawFile,
    ReadLimits,
    UnreadableFileError,
    list_files,
    read_record_chunks,
)
from zero2all.recipe import SourceRecipe

SIZES = (40_000, 160_000)
MAX_GROWTH = 9.0  # for four times the size: linear is 4, quadratic 16


def read(file: RawFile) -> tuple[int, list[str]]:
    """How many records there were, and the reasons for what was left out."""
    records, reasons = 0, []
    try:
        for chunk in read_record_chunks(file):
            for record in chunk:
                if isinstance(record, BrokenRecord):
                    reasons.append(record.reason)
                else:
                    records += 1
    except UnreadableFileError as reason:
        reasons.append(str(reason))
    return records, reasons


def long_if(name: str, names: Container[str]) -> Any:
    return pytest.param(name, marks=pytest.mark.long) if name in names else name


@pytest.mark.parametrize("name", [long_if(name, LONG_FILES) for name in READER_FILES])
def test_a_hostile_file(name: str, tmp_path: Path) -> None:
    file, make = READER_FILES[name]
    (tmp_path / file).write_bytes(make())
    _, reasons = survives(lambda: read(RawFile.from_path(tmp_path / file)))
    assert all("\n" not in reason and len(reason) < 200 for reason in reasons)
    assert [path.name for path in tmp_path.iterdir()] == [file], "nothing was unpacked"


def test_many_small_bombs_in_one_zip_are_one_bomb(tmp_path: Path) -> None:
    """Each of them unpacks to less than is looked at."""
    limits = ReadLimits(ratio_check_bytes=4 << 20)
    (tmp_path / "a.zip").write_bytes(zip_of({f"{n}.txt": b"0" * (1 << 20) for n in range(30)}))
    reasons = [
        record.reason
        for chunk in read_record_chunks(RawFile.from_path(tmp_path / "a.zip"), limits)
        for record in chunk
        if isinstance(record, BrokenRecord)
    ]
    assert reasons[-1] == "unpacks to more than 250 times its size"
    assert len(reasons) < 8


@pytest.mark.parametrize("name", ODD_FILES)
def test_an_odd_file_beside_a_good_one(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "good.txt").write_text("An ordinary text.\n")
    ODD_FILES[name](folder)
    source = SourceRecipe(name="a", paths=[str(folder)])
    found = survives(lambda: {os.fsencode(file.name): read(file) for file in list_files(source)})
    assert found[b"good.txt"] == (1, [])
    assert b"passwd.txt" not in found or found[b"passwd.txt"][0] == 0


@pytest.mark.parametrize("name", [long_if(name, {"lines of one character"}) for name in COMPLEXITY])
def test_four_times_the_size_takes_about_four_times_as_long(name: str, tmp_path: Path) -> None:
    file, make = COMPLEXITY[name]
    seconds = []
    for size in SIZES:
        (tmp_path / file).write_bytes(make(size))
        _, cost = measure(lambda: read(RawFile.from_path(tmp_path / file)))
        assert cost.is_bounded, (size, cost)
        seconds.append(cost.seconds)
    assert seconds[1] < max(NOISE, MAX_GROWTH * seconds[0]), seconds
