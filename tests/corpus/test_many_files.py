"""Many small files share parts; a part of a source can be taken; both choices survive added files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.corpus.builds import build_source, source_of, texts_of
from zero2all.base.errors import RecipeError
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import build, part_files, summary_lines
from zero2all.corpus.document import SCHEMA, is_taken, is_validation
from zero2all.corpus.part_files import DocumentWriter, group_small_files
from zero2all.corpus.readers import RawFile, UnreadableFileError, documents, list_files
from zero2all.corpus.readers.base import NOT_INSTALLED
from zero2all.corpus.readers.listing import FileRange
from zero2all.recipe import parse_recipe

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "many_files.py"


def write_notes(directory: Path, numbers: range) -> None:
    directory.mkdir(exist_ok=True)
    for number in numbers:
        (directory / f"note-{number:05}.txt").write_text(f"The note number {number} says {number * number}.\n")


def files_of(sizes: list[int]) -> list[RawFile]:
    return [RawFile(f"/{number}.txt", f"{number}.txt", size) for number, size in enumerate(sizes)]


def test_small_files_share_parts_and_large_ones_have_their_own() -> None:
    part_of_large = RawFile("/x", "x", 10, file_range=FileRange("jsonl", 0, 9))
    files = [*files_of([100] * 5000 + [300_000] + [100] * 3), part_of_large]
    groups = list(group_small_files(files))
    assert [file for group in groups for file in group] == files
    assert [len(group) for group in groups if group[0].bytes > 100 or group[0].file_range] == [1, 1]
    assert 5 < len(groups) < 60
    assert max(map(len, groups)) <= part_files.MAX_GROUP_FILES
    sizes = [sum(file.bytes for file in group) for group in group_small_files(files_of([200_000] * 200))]
    assert max(sizes) < part_files.GROUP_BYTES + 200_000


def test_an_added_file_changes_one_group() -> None:
    files = files_of([100] * 5000)
    before = set(group_small_files(files))
    after = set(group_small_files([*files[:2500], RawFile("/new.txt", "new.txt", 5), *files[2500:]]))
    assert len(before - after) == 1
    assert 1 <= len(after - before) <= 2


def test_a_folder_of_notes_is_a_few_parts_and_the_same_documents_on_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_files, "GROUP_FILES", 16)
    write_notes(tmp_path / "raw", range(60))
    (tmp_path / "raw" / "note-00030.txt").write_text("")
    (tmp_path / "raw" / "note-00031.bin").write_bytes(bytes(10))
    one = build_source(tmp_path / "raw", tmp_path / "one")
    assert (one.documents, one.sources["s"].files) == (59, 61)
    assert one.left_out["s"].files["format .bin"].first == ["note-00031.bin"]
    assert one.left_out["s"].record_files["no text in it"].first == ["note-00030.txt"]
    parts = list((tmp_path / "one.work" / "parts").glob("*.parquet"))
    assert 2 <= len(parts) <= 12
    assert build_source(tmp_path / "raw", tmp_path / "two", TaskEngine(workers=2)).files == one.files
    monkeypatch.setattr(part_files, "GROUP_FILES", 1)  # as if every file were large
    assert build_source(tmp_path / "raw", tmp_path / "alone").files == one.files
    assert len(list((tmp_path / "alone.work" / "parts").glob("*.parquet"))) == 61


def test_a_rerun_after_a_change_reads_one_group_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_notes(tmp_path / "raw", range(700))
    build_source(tmp_path / "raw", tmp_path / "out")
    read: list[int] = []
    written = part_files.read_documents

    def noted(file: RawFile, *args: Any) -> Any:
        read.append(file.bytes)
        return written(file, *args)

    monkeypatch.setattr(part_files, "read_documents", noted)
    (tmp_path / "raw" / "note-00350.txt").write_text("Another text that nobody had seen.\n")
    again = build_source(tmp_path / "raw", tmp_path / "out")
    assert "Another text that nobody had seen.\n" in texts_of(tmp_path / "out")
    assert again.documents == 700
    assert 0 < len(read) < 700


def test_a_writer_of_single_documents_holds_few_batches(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pylist([dict.fromkeys(SCHEMA.names, "short")], schema=SCHEMA)
    with DocumentWriter(tmp_path / "a.parquet") as writer:
        for _ in range(1000):
            writer.write(batch)
            assert len(writer._batches) <= part_files.MAX_PENDING_BATCHES + 1
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 1
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 1000


@pytest.mark.long
def test_twenty_thousand_files_are_built_in_bounded_time_and_memory(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARK), "--work", str(tmp_path), "--files", "20000"]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    listed, built = map(json.loads, printed.splitlines())
    assert listed["count"] == built["count"] == 20_000
    assert listed["cpu_seconds"] < 10
    assert built["cpu_seconds"] < 100
    assert built["peak_mib"] < 300


def test_what_is_installed_decides_if_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise UnreadableFileError(NOT_INSTALLED)

    write_notes(tmp_path / "raw", range(3))
    monkeypatch.setattr(build, "missing_packages", lambda: ["pypdf"])
    unaffected = build_source(tmp_path / "raw", tmp_path / "out")
    (tmp_path / "raw" / "a.pdf").write_bytes(b"%PDF-1.7")
    monkeypatch.setattr(documents, "require_package", missing)
    affected = build_source(tmp_path / "raw", tmp_path / "more")
    assert build_source(tmp_path / "raw", tmp_path / "more").reused
    monkeypatch.undo()
    monkeypatch.setattr(build, "missing_packages", list)
    again = build_source(tmp_path / "raw", tmp_path / "more")
    assert not again.reused
    assert again.key != affected.key
    assert list(again.left_out["s"].files) != list(affected.left_out["s"].files)
    (tmp_path / "raw" / "a.pdf").unlink()
    same = build_source(tmp_path / "raw", tmp_path / "out")
    assert (same.reused, same.key) == (True, unaffected.key)


# --- take


def taken(directory: Path, count: int) -> list[str]:
    return [file.name for file in list_files(source_of(directory, take={"files": count})) if not file.skip_reason]


def test_some_files_are_taken_by_name_and_an_added_one_replaces_at_most_one(tmp_path: Path) -> None:
    write_notes(tmp_path / "a", range(44))
    first = taken(tmp_path / "a", 20)
    assert len(first) == 20
    assert set(taken(tmp_path / "a", 10)) < set(first)
    (tmp_path / "a").rename(tmp_path / "moved")
    assert taken(tmp_path / "moved", 20) == first
    write_notes(tmp_path / "moved", range(44, 50))
    assert len(set(first) & set(taken(tmp_path / "moved", 20))) >= 14
    assert len(taken(tmp_path / "moved", 500)) == 50
    assert first != sorted(first)[:20] or first[-1] > "note-00020.txt"  # not simply the first ones


def test_files_that_are_not_taken_are_counted(tmp_path: Path) -> None:
    write_notes(tmp_path / "raw", range(44))
    manifest = build_source(tmp_path / "raw", tmp_path / "out", take={"files": 20})
    assert manifest.documents == 20
    assert manifest.left_out["s"].files["not taken"].count == 24
    assert manifest.sources["s"].files == 44
    assert summary_lines(manifest)[1].startswith("  skipped: 24 files (not taken: note-")
    more = build_source(tmp_path / "raw", tmp_path / "out", take={"files": 30})
    assert (more.documents, more.reused) == (30, False)


def test_a_share_of_documents_is_taken_and_grows_with_the_share(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "text number {n}"}}\n' for n in range(1000)))
    quarter = build_source(tmp_path / "a.jsonl", tmp_path / "quarter", take=0.25)
    assert 200 < quarter.documents < 300
    assert quarter.left_out["s"].documents == {"not taken": 1000 - quarter.documents}
    assert quarter.sources["s"].read.documents == quarter.documents
    half = build_source(tmp_path / "a.jsonl", tmp_path / "half", take=0.5)
    assert set(texts_of(tmp_path / "quarter")) < set(texts_of(tmp_path / "half"))
    assert 450 < half.documents < 550
    (tmp_path / "b.jsonl").write_text('{"text": "more"}\n')
    build_source(tmp_path, tmp_path / "more", take=0.25)
    assert set(texts_of(tmp_path / "quarter")) <= set(texts_of(tmp_path / "more"))


def test_the_share_says_nothing_about_the_split() -> None:
    gids = [f"{number * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**128:032x}" for number in range(20_000)]
    both = sum(is_taken(gid, 0.25) and is_validation(gid, 0.1) for gid in gids)
    assert both == pytest.approx(0.25 * 0.1 * len(gids), rel=0.2)


@pytest.mark.parametrize("take", [0, 1.5, 20, -1, "20", {"files": 0}, {"file": 3}, True])
def test_a_wrong_take_is_one_mistake_with_both_forms(take: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(yaml.safe_dump({"corpus": {"sources": [{"name": "s", "paths": ["x"], "take": take}]}}))
    assert all(problem.path.startswith("corpus.sources.0.take") for problem in caught.value.problems)
    if not isinstance(take, dict | bool):
        (problem,) = caught.value.problems
        assert "{files: 20}" in problem.message
