"""Files that would hang, crash or bloat a build: each is counted with its reason, and the rest is built."""

from __future__ import annotations

import gzip
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.builds import build_source, corpus_of, source_of, texts_of
from tests.corpus.document_files import zip_of
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.tasks import TaskEngine, shutdown_workers
from zero2all.corpus import BuiltCorpus, build, build_corpus, part_files
from zero2all.corpus.readers import (
    BrokenRecord,
    RawFile,
    ReadLimits,
    UnreadableFileError,
    json_records,
    read_record_chunks,
    read_records,
)
from zero2all.corpus.readers import parquet as parquet_reader
from zero2all.corpus.readers.listing import find_file
from zero2all.corpus.sniff import sniff
from zero2all.recipe import SourceRecipe

TEXT = "An ordinary text that is there to be read, and long enough to stay.\n" * 20


def built(raw: Path, out: Path, engine: TaskEngine | None = None, **source: Any) -> BuiltCorpus:
    return build_source(raw, out, engine, name="raw", **source)


def contents(documents: Path) -> set[str]:
    return set(texts_of(documents))


def files_left_out(manifest: BuiltCorpus) -> dict[str, list[str]]:
    return {reason: found.first for reason, found in manifest.left_out["raw"].files.items()}


@pytest.mark.timeout(20)
def test_fifos_sockets_and_devices_are_counted_not_opened(tmp_path: Path, raw: Path) -> None:
    (raw / "good.txt").write_text(TEXT)
    os.mkfifo(raw / "pipe.txt")
    (raw / "null.txt").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(raw)  # the path of a socket may have 107 bytes
        try:
            server.bind("socket.txt")
        finally:
            os.chdir(here)
        manifest = built(raw, tmp_path / "documents")
    assert manifest.sources["raw"].read.documents == 1
    left_out = sorted(name for names in files_left_out(manifest).values() for name in names)
    assert left_out == ["null.txt", "pipe.txt", "socket.txt"]
    assert files_left_out(manifest)["link or device"][-2:] == ["pipe.txt", "socket.txt"]


@pytest.mark.timeout(20)
def test_a_file_that_becomes_a_fifo_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it was listed, and between the check and the open."""
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    file, regular = RawFile.from_path(path), os.stat(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnreadableFileError, match="link or device"):
        list(read_records(file))
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda *_, **__: regular)  # what was seen before the swap
        with pytest.raises(UnreadableFileError, match="link or device"):
            file.open()


def nested(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


@pytest.mark.parametrize("depth", [250, 990, 1010, 1020, 1100, 5000])
def test_nesting_too_deep_breaks_one_record_in_every_reader(
    tmp_path: Path, raw: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "MAX_IN_MEMORY_BYTES", 1 << 16)
    deep, fine = f'{{"text": "deep", "x": {nested(depth)}}}', '{"text": "NAME", "x": [[1]]}'
    (raw / "lines.jsonl").write_text(f"{deep}\n{nested(depth)}\n" + fine.replace("NAME", "a line"))
    (raw / "array.json").write_text(f"[{fine.replace('NAME', 'first element')}, {deep}]")
    (raw / "object.json").write_text(deep)
    padding = " " * (1 << 16)  # large enough for the streaming parser
    (raw / "stream.json").write_text(f'{{"data": [{fine.replace("NAME", "streamed")}, {deep}{padding}]}}')
    (raw / "table.csv").write_text(f'text,x\nin a table,"{nested(depth)}"\n')
    (raw / "archive.zip").write_bytes(zip_of({"member.jsonl": f"{deep}\n{fine.replace('NAME', 'a member')}".encode()}))
    manifest = built(raw, tmp_path / "documents")
    assert contents(tmp_path / "documents") == {"a line", "first element", "streamed", "in a table", "a member"}
    left_out = manifest.left_out["raw"]
    reasons = Counter(left_out.documents)
    assert set(reasons) <= {"nested too deep", "not an object"}
    assert sum(reasons.values()) + sum(found.count for found in left_out.files.values()) == 6
    assert any(place.startswith("archive.zip!member.jsonl") for place in manifest.sources["raw"].quarantine)


def test_deep_records_do_not_stop_sniffing_or_decontamination(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "deep", "x": {nested(1000)}}}\n{{"text": "fine"}}\n')
    found = sniff(tmp_path / "a.jsonl").content
    assert found is not None
    assert found.preview["content"] == "fine"
    assert any("nested too deep" in broken for broken in found.broken)
    (tmp_path / "text.txt").write_text("words of a document")
    recipe = corpus_of(source_of(tmp_path / "text.txt"), decontaminate=[str(tmp_path / "a.jsonl")])
    assert build_corpus(recipe, tmp_path / "documents").documents == 1


MEGABYTE = "x" * (1 << 20)
ROWS = 200
SMALL = ReadLimits(max_compression_ratio=100, ratio_check_bytes=32 << 20, record_bytes=8 << 20)


def repeated(text: str, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, dtype=np.int32)), pa.array([text]))


def bomb(path: Path, kind: str) -> None:
    """A file of a few kilobytes that holds 200 MB or more."""
    if kind == "dictionary":
        table, options = pa.table({"text": repeated(MEGABYTE, ROWS)}), {}
    elif kind == "list":  # one row after the other has more than a record may
        lists = pa.ListArray.from_arrays(
            pa.array(range(0, 10 * ROWS + 1, ROWS), pa.int32()), repeated("y" * 2**18, 10 * ROWS)
        )
        table, options = pa.table({"text": ["text"] * 10, "lists": lists}), {}
    elif kind == "struct":
        table, options = pa.table({"meta": pa.StructArray.from_arrays([repeated(MEGABYTE, ROWS)], ["text"])}), {}
    elif kind == "delta":
        table = pa.table({"text": [MEGABYTE] * ROWS})
        options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    else:  # the compression alone
        table, options = pa.table({"text": [MEGABYTE] * ROWS}), {"use_dictionary": False}
    pq.write_table(table, path, compression="zstd", store_schema=False, **options)


@contextmanager
def memory_pool() -> Iterator[pa.MemoryPool]:
    """Counts what Arrow allocates."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


@pytest.mark.parametrize("kind", ["dictionary", "list", "struct", "delta", "plain"])
def test_parquet_that_decodes_to_far_more_than_its_size_stays_small_in_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bomb.parquet"
    bomb(path, kind)
    assert path.stat().st_size < 50_000
    characters, reasons = [0], []
    with memory_pool() as pool:
        for batch in read_record_chunks(RawFile.from_path(path), SMALL):
            reasons += [record.reason for record in batch if isinstance(record, BrokenRecord)]
            characters.append(sum(len(str(record)) for record in batch if not isinstance(record, BrokenRecord)))
    assert max(characters) < 3 << 20
    assert sum(characters) < 40 << 20
    assert pool.max_memory() < 120 << 20
    expected = {"list": ["row larger than 8 MiB"] * 10}
    assert reasons == expected.get(kind, ["unpacks to more than 100 times its size"])


@pytest.mark.parametrize("size", [1 << 18, 1 << 20])
def test_values_of_a_dictionary_limit_the_rows_that_are_decoded_at_once(tmp_path: Path, size: int) -> None:
    """Small text for long, so that the average says nothing, and then a large value many times."""
    indices = pa.array(np.repeat(np.arange(2, dtype=np.int32), [30_000, 300]))
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["small", "y" * size]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, store_schema=False)
    with memory_pool() as pool:
        batches = read_record_chunks(RawFile.from_path(path), SMALL)
        characters = [sum(len(str(record)) for record in batch) for batch in batches]
    assert max(characters) < 3 << 20
    assert pool.max_memory() < 60 << 20


@pytest.mark.parametrize("names", [["text", "text"], ["text.list.element", "text"]])
def test_small_text_does_not_vouch_for_another_column_with_the_same_path(tmp_path: Path, names: list[str]) -> None:
    indices = pa.array(np.repeat(np.arange(2, dtype=np.int32), [30_000, 300]))
    large: pa.Array = pa.DictionaryArray.from_arrays(indices, pa.array(["small", MEGABYTE]))
    if names[0] != names[1]:
        large = pa.ListArray.from_arrays(pa.array(range(30_301), pa.int32()), large)
    for arrays in ([pa.array(["tiny"] * 30_300), large], [large, pa.array(["tiny"] * 30_300)]):
        ordered = names if arrays[1] is large else names[::-1]
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_arrays(arrays, ordered), path, store_schema=False)
        metadata = pq.read_metadata(path)
        with path.open("rb") as file:
            group = parquet_reader.read_row_groups(file, metadata.num_columns)[0]
            part = parquet_reader._RowGroupFile(file, metadata, 0, group)
            chosen = parquet_reader._choose_read_options(part)
        assert set(chosen.dictionaries) == {metadata.schema.column(0).path}


def test_a_parquet_bomb_is_counted_and_the_rest_is_built(tmp_path: Path, raw: Path) -> None:
    with pq.ParquetWriter(raw / "a.parquet", pa.schema([("text", pa.string())]), compression="zstd") as writer:
        writer.write_table(pa.table({"text": ["before"]}))
        writer.write_table(pa.table({"text": [MEGABYTE] * ROWS}))
        writer.write_table(pa.table({"text": ["after"]}))
    manifest = built(raw, tmp_path / "documents")
    assert contents(tmp_path / "documents") >= {"before", "after"}
    assert manifest.left_out["raw"].documents == {"unpacks to more than 250 times its size": 1}
    assert manifest.sources["raw"].quarantine == ["a.parquet row group 1: unpacks to more than 250 times its size"]


def test_rows_of_dictionaries_of_every_shape_are_the_rows_that_were_written(tmp_path: Path) -> None:
    rows = [
        {"id": n, "text": f"text {n % 3}" * (n % 5), "tags": ["a", None, "b" * n][: n % 4], "meta": {"k": f"v{n % 2}"}}
        for n in range(3000)
    ]
    rows[7] |= {"text": None, "tags": None, "meta": None}
    rows[8] |= {"text": "z" * (3 << 20)}
    table = pa.Table.from_pylist(rows)
    table = table.append_column(
        "pairs", pa.array([[("k", "v" * (n % 3))] for n in range(3000)], pa.map_("string", "string"))
    )
    table = table.append_column("two", pa.array([["l", f"r{n % 2}"] for n in range(3000)], pa.list_(pa.string(), 2)))
    table = table.append_column("none", pa.nulls(3000, pa.string()))
    for options in ({}, {"use_dictionary": False}, {"row_group_size": 700}):
        pq.write_table(table, tmp_path / "a.parquet", **options)
        assert list(read_records(RawFile.from_path(tmp_path / "a.parquet"))) == table.to_pylist()


def test_links_out_of_a_source_are_counted_and_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(build, "warn", warnings.append)
    raw, outside = tmp_path / "raw", tmp_path / "outside"
    (raw / "inside").mkdir(parents=True)
    (outside / "deep").mkdir(parents=True)
    (outside / "secret.txt").write_text("a secret")
    (outside / "deep" / "more.txt").write_text("more secrets")
    (raw / "inside" / "a.txt").write_text("a text")
    (raw / "passwd.txt").symlink_to(outside / "secret.txt")
    (raw / "up.txt").symlink_to("../outside/secret.txt")
    (raw / "folder").symlink_to(outside)
    (raw / "through.txt").symlink_to(raw / "folder" / "secret.txt")
    (raw / "same.txt").symlink_to(raw / "inside" / "a.txt")
    (raw / "raw").symlink_to(tmp_path / "raw2")  # a name with the same prefix is not inside
    (tmp_path / "raw2").mkdir()
    (tmp_path / "raw2" / "b.txt").write_text("text beside it")
    manifest = built(raw, tmp_path / "documents")
    assert contents(tmp_path / "documents") == {"a text"}
    names = ["folder", "passwd.txt", "raw", "through.txt", "up.txt"]
    assert files_left_out(manifest) == {"link out of the source (follow_links: true reads it)": names}
    (warning,) = warnings
    assert warning.startswith("corpus source 'raw': 5 links")
    assert "follow_links: true" in warning
    warnings.clear()
    followed = built(raw, tmp_path / "followed", follow_links=True)
    assert contents(tmp_path / "followed") == {"a text", "a secret", "more secrets", "text beside it"}
    assert not files_left_out(followed)
    assert not warnings


def test_links_out_are_warned_of_once_a_source_and_also_if_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(build, "warn", warnings.append)
    (tmp_path / "blob").write_text(TEXT)
    for name, count in (("a", 1), ("b", 2), ("c", 0)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.txt").symlink_to(tmp_path / "blob")
        (tmp_path / name / "empty.txt").touch()
    with pytest.raises(Z2aError, match="no document is left"):
        build_corpus(corpus_of(*(source_of(tmp_path / name, name) for name in "abc")), tmp_path / "documents")
    assert [warning.split(" out of")[0] for warning in warnings] == [
        "corpus source 'a': 1 link",
        "corpus source 'b': 2 links",
    ]


def test_a_source_that_is_a_link_itself_is_read(tmp_path: Path, raw: Path) -> None:
    (raw / "a.txt").write_text("a text")
    for target in (raw, raw / "a.txt"):
        link, out = tmp_path / f"link to {target.name}", tmp_path / f"documents of {target.name}"
        link.symlink_to(target)
        built(link, out)
        assert contents(out) == {"a text"}


def test_links_that_a_pattern_finds_are_not_followed_out_of_its_folder(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    (raw / "inside").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("a secret")
    (raw / "inside" / "a.txt").write_text("a text")
    (raw / "link.txt").symlink_to(tmp_path / "secret.txt")
    (raw / "up").symlink_to(tmp_path)
    (tmp_path / "entry").symlink_to(raw)
    for number, pattern in enumerate(("raw/**/*.txt", "raw/*", "entry/**/*.txt", "ra?/**/*.txt")):
        manifest = built(tmp_path / pattern, tmp_path / f"documents{number}")
        wanted = {"a text"} if number < 3 else {"a text", "a secret"}  # of the last one the folder is above
        assert contents(tmp_path / f"documents{number}") == wanted, pattern
        assert bool(files_left_out(manifest)) == (number < 3)


DIGITS = "1" * 5000  # Python reads numbers of 4300 digits


@pytest.mark.parametrize("small", [1 << 16, 10])  # the second is for the streaming parser
def test_a_number_too_long_is_broken_json_in_every_reader(
    tmp_path: Path, raw: Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_records, "MAX_IN_MEMORY_BYTES", small)
    bad, good = f'{{"text": "bad", "n": -{DIGITS}}}', '{"text": "good"}'
    (raw / "lines.jsonl").write_text(f"{bad}\n{good}\n")
    (raw / "array.json").write_text(f"[{good}, {bad}]")
    (raw / "first.json").write_text(f"[{bad}, {good}]")
    (raw / "list.json").write_text(f'{{"data": [{good}, {bad}, {good}]}}')
    manifest = built(raw, tmp_path / "documents")
    left_out = manifest.left_out["raw"]
    reasons = set(left_out.documents) | set(left_out.files)
    assert reasons <= {"broken JSON", "broken JSON from here on", "no text in it"}
    assert left_out.documents["broken JSON"] >= 3


@pytest.mark.parametrize("workers", [1, 2])
def test_files_that_vanish_or_change_while_the_corpus_is_built_are_named(
    tmp_path: Path, raw: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"text": ["a row"]}), raw / "cut.parquet")
    for name in ("good", "gone", "grown", "shorter"):
        (raw / f"{name}.jsonl").write_text(f'{{"text": "first of {name}"}}\n{{"text": "second of {name}"}}\n')
    listed = build.list_files

    def then_change(source: SourceRecipe) -> list[RawFile]:
        files = listed(source)
        (raw / "gone.jsonl").unlink()
        with open(raw / "grown.jsonl", "a") as stream:
            stream.write('{"text": "third of grown"}\n')
        os.truncate(raw / "shorter.jsonl", 40)
        os.truncate(raw / "cut.parquet", 100)
        return files

    monkeypatch.setattr(build, "list_files", then_change)
    manifest = built(raw, tmp_path / "documents", TaskEngine(workers=workers))
    assert files_left_out(manifest) == {
        "changed while it was read": ["cut.parquet", "grown.jsonl", "shorter.jsonl"],
        "file not found": ["gone.jsonl"],
    }
    assert contents(tmp_path / "documents") >= {"first of good", "second of good", "first of grown", "first of shorter"}
    monkeypatch.setattr(build, "list_files", listed)
    again = built(raw, tmp_path / "documents")
    assert "third of grown" in contents(tmp_path / "documents")
    assert [names for reason, names in files_left_out(again).items()] == [["cut.parquet"]]


def test_a_file_cut_short_in_the_middle_of_being_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a line of some length"}\n' * 100_000)
    batches = read_record_chunks(RawFile.from_path(path))
    assert next(batches)
    os.truncate(path, 0)
    with pytest.raises(UnreadableFileError, match="changed while it was read"):
        list(batches)


@pytest.mark.parametrize("listing", ["source", "evaluation", "one file"])
def test_an_empty_path_is_an_error_of_one_line(tmp_path: Path, listing: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    source = source_of("" if listing == "source" else tmp_path / "a.txt")
    recipe = corpus_of(source, decontaminate=[""] if listing == "evaluation" else [])
    with pytest.raises(UsageError, match="empty path") as caught:
        find_file("") if listing == "one file" else build_corpus(recipe, tmp_path / "documents")
    assert "\n" not in str(caught.value)


class KillingFile(RawFile):
    """Opened, it kills the process that reads it."""

    def open(self, *words: Any) -> Any:
        if not self.skip_reason:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open(*words)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_file_that_kills_its_worker_is_tried_again_and_then_left_out(
    tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        (raw / f"{number}.jsonl").write_text(f'{{"text": "text of {number}"}}\n')
    listed = build.list_files
    monkeypatch.setattr(build, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(build, "group_small_files", lambda files: [(file,) for file in files])

    def with_killer(source: SourceRecipe) -> list[RawFile]:
        files = listed(source)
        killer = {field.name: getattr(files[3], field.name) for field in fields(files[3])}
        return [*files[:3], KillingFile(**killer), *files[4:]]

    monkeypatch.setattr(build, "list_files", with_killer)
    manifest = built(raw, tmp_path / "documents", TaskEngine(workers=2))
    assert files_left_out(manifest) == {"killed its worker process twice": ["3.jsonl"]}
    assert contents(tmp_path / "documents") == {f"text of {number}" for number in (0, 1, 2, 4, 5)}
    monkeypatch.setattr(build, "list_files", listed)  # as after an update of the library that crashed
    built(raw, tmp_path / "documents", TaskEngine(workers=2))
    assert "text of 3" in contents(tmp_path / "documents")
    shutdown_workers()


@pytest.mark.parametrize("is_archive", [False, True])
def test_many_small_bombs_do_not_add_up(
    tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch, is_archive: bool
) -> None:
    """Each is below the size from which one file is checked."""
    size = 4_000_000
    texts = {f"{number}.txt": f"{number} {'x' * 10_000}\n".encode() * (size // 10_000) for number in range(10)}
    if is_archive:
        (raw / "a.zip").write_bytes(zip_of(texts))
    else:
        for name, text in texts.items():
            (raw / f"{name}.gz").write_bytes(gzip.compress(text))
    monkeypatch.setattr(part_files, "GROUP_FILES", 1 << 60)  # all in one part
    monkeypatch.setattr(part_files, "PART_LIMITS", ReadLimits(ratio_check_bytes=10_000_000))
    manifest = built(raw, tmp_path / "documents")
    (reason,) = files_left_out(manifest)
    assert reason == "unpacks to more than 250 times its size"
    assert manifest.sources["raw"].read.bytes < 5 * size
