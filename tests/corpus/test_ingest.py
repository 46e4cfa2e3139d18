"""Batches of documents: the same ones as reading record by record gave, in ranges as in one read."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.gids import make_gid
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import build_corpus
from zero2all.corpus.ingest import FileStats, read_documents, to_record_batch
from zero2all.corpus.mapping import AUTOMATIC
from zero2all.corpus.readers import RawFile, list_files, records, split_large_file
from zero2all.corpus.readers.encoding import fix_mojibake
from zero2all.recipe import CorpusRecipe, SourceRecipe

# Of the documents that each file gave when every record was mapped alone, before there were batches, but for the blank
# lines at both ends.
DIGESTS = {
    "zh/wiki2019zh_style/wiki_zh_00.jsonl": "a72251bc6f2cc912",
    "zh/wiki2019zh_style/wiki_zh_01.jsonl.zst": "13293cd83f6beb8f",
    "zh/news2016zh_style/news_zh_train_extra.jsonl.gz": "738d0f1422f43233",
    "zh/poetry/chinese_poetry.json": "b3e171b4ba36a165",
    "zh/wikiextractor_raw/AA/wiki_60": "874670c4c68deb85",
    "zh/txt/三国演义.txt": "e3ceff545ffbe3ec",
    "en/wiki_parquet/train-00000-of-00002.parquet": "66d85d208637285c",
    "en/speeches/us_presidential.jsonl": "7af37fa534004f0e",
    "code/pypi_web_packages.zip": "d6f495d06dc51e70",
    "code/cpython_stdlib_3.11.7.tar.gz": "dcc5512a562e60d2",
    "dirty/encoding/medical_qa_head.gb18030.csv": "0f4634587ca3ff32",
    "dirty/encoding/dracula_345-8.latin1.txt": "06d89eb8702541b8",
    "dirty/malformed/alpaca_zh_unfinished.broken.json": "e63aef3fc1c6de90",
    "dirty/web/creativecommons.warc.gz": "873cfb65795baac8",
    "dirty/html_pages/en_servicecomb__Apache-ServiceComb-Meetup-2018-Shanghai.html": "86d5f92a963be3b5",
    "dirty/mojibake/ftfy_in_the_wild.json": "bc549ffd347c84c7",
    "eval/cmrc2018_trial.json": "e3b0c44298fc1c14",
    "sft/alpaca_zh_3k.json": "fbfffa1d71e7aa32",
    "zh/laws_json_dir/0001.json": "80091bf577923470",
}


def documents(file: RawFile, **options: Any) -> tuple[list[dict[str, Any]], FileStats]:
    source = SourceRecipe(**{"name": "s", "paths": ["x"], **options})
    stats = FileStats()
    rows = [row for batch in read_documents(file, source, stats) for row in batch.to_pylist()]
    return rows, stats


@pytest.mark.parametrize("name", DIGESTS)
def test_every_shape_gives_the_documents_it_gave_record_by_record(shared_corpus: Path, name: str) -> None:
    top, _, below = name.partition("/")
    source = SourceRecipe(name=top, paths=[str(shared_corpus / top)])
    (file,) = (file for file in list_files(source) if file.name == below)
    rows, _ = documents(file, name=top)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    assert digest.hexdigest()[:16] == DIGESTS[name]


def lines_of(count: int, rng: random.Random) -> list[bytes]:
    """Records with and without ids, broken ones, blank lines, and some longer than a range."""
    lines = []
    for number in range(count):
        record = {"text": f"第{number}行 " + "长" * rng.choice([1, 30, 300]), "n": number}
        line = json.dumps(record | ({"id": f"own {number}"} if number % 3 else {}), ensure_ascii=False).encode()
        lines.append(rng.choices([line, b"", line[:-3], line + b"\r"], [20, 1, 1, 1])[0])
    return lines


@pytest.mark.parametrize("size", [1000, 1234, 9000])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_ranges_of_jsonl_contain_every_line_once(tmp_path: Path, size: int, mark: bytes) -> None:
    lines = lines_of(400, random.Random(size))
    (tmp_path / "a.jsonl").write_bytes(mark + b"\n".join(lines))
    file = RawFile.from_path(tmp_path / "a.jsonl")
    parts = split_large_file(file, size)
    assert len(parts) > 3
    assert sum(part.bytes for part in parts) == file.bytes
    assert len({part.fingerprint for part in parts}) == len(parts)
    whole, stats = documents(file)
    read = [documents(part) for part in parts]
    together = [row for rows, _ in read for row in rows]
    named = [row | {"id": ""} if row["id"].startswith("a.jsonl#") else row for row in whole]
    assert [row | {"id": ""} if row["id"].startswith("a.jsonl#") else row for row in together] == named
    assert len({row["id"] for row in together}) == len(together)
    assert sum(one.skipped["broken JSON"] for _, one in read) == stats.skipped["broken JSON"] > 3
    places = [place for _, one in read for place in one.quarantine]
    assert len(set(places)) == len(places)


def test_ranges_of_parquet_are_row_groups_and_keep_every_name(tmp_path: Path) -> None:
    texts = [f"text {number} " * 50 for number in range(1000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=90, compression="none")
    file = RawFile.from_path(tmp_path / "a.parquet")
    parts = split_large_file(file, file.bytes // 4)
    assert 3 <= len(parts) <= 5
    assert [row for part in parts for row in documents(part)[0]] == documents(file)[0]


def test_no_damaged_footer_ends_the_process_that_splits_a_file(tmp_path: Path) -> None:
    """Arrow's own accessors abort on some of them. So this is a process that would end with the first."""
    pq.write_table(pa.table({"text": ["a", "b"] * 20}), tmp_path / "a.parquet", compression="none")
    code = """if True:
        import sys
        from pathlib import Path
        from zero2all.corpus.readers import RawFile, split_large_file
        path = Path(sys.argv[1])
        data = path.read_bytes()
        for place in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 8):
            for flipped in (1, 0x80):
                path.write_bytes(data[:place] + bytes([data[place] ^ flipped]) + data[place + 1 :])
                split_large_file(RawFile.from_path(path), 100)
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.parquet")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_cannot_be_split_stays_one_file(tmp_path: Path) -> None:
    rows = [{"text": f"text {number}"} for number in range(500)]
    contents = {
        "array.json": json.dumps(rows).encode(),
        "gb.jsonl": "".join(json.dumps({"text": "春眠不觉晓"}, ensure_ascii=False) + "\n" for _ in rows).encode(
            "gb18030"
        ),
        "text.txt": b"word " * 2000,
        "broken.parquet": b"PAR1" + b"x" * 9000,
        "odd.bin": b"\0" * 9000,
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        file = RawFile.from_path(tmp_path / name)
        assert split_large_file(file, 1000) == [file], name
    gone = replace(RawFile.from_path(tmp_path / "text.txt"), path=str(tmp_path / "gone.jsonl"))
    assert split_large_file(gone, 1000) == [gone]


@pytest.mark.slow
def test_a_large_file_gives_the_same_bytes_on_any_number_of_workers(
    tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (raw / "a.jsonl").write_bytes(b"\n".join(lines_of(400, random.Random(1))))
    recipe = CorpusRecipe(sources=[SourceRecipe(name="s", paths=[str(raw)])], filters=[], holdout=0)
    whole = build_corpus(recipe, tmp_path / "whole")
    monkeypatch.setattr(records, "FILE_RANGE_BYTES", 20_000)
    built = [build_corpus(recipe, tmp_path / str(workers), TaskEngine(workers=workers)) for workers in (1, 2)]
    assert built[0].sources["s"].files == 1
    assert len(list((tmp_path / "1.work" / "parts").glob("*.json"))) > 3
    assert built[0].files == built[1].files
    assert built[0].documents == whole.documents


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("\n \t\n  indented\n\ninside\n\n  \n", "  indented\n\ninside\n"),
        ("\r\n\r\nof Windows\r\n\r\n", "of Windows\r\n"),
        ("\r\rof old Macs\r\r", "of old Macs\r"),
        ("\u3000\u3000中文\n\u3000\n", "\u3000\u3000中文\n"),
        *((same, same) for same in ("one line", "one line\n", "  spaces  ", "a\n\n\nb")),
    ],
)
def test_blank_lines_at_both_ends_go_and_the_gid_stays(text: str, stripped: str) -> None:
    source = SourceRecipe(name="s", paths=["x"])
    (row,) = to_record_batch([{"text": text}], AUTOMATIC, source, "a#", 0, FileStats()).to_pylist()
    assert row["content"] == stripped
    assert row["gid"] == make_gid("s", "", text)


def test_only_bad_lines_of_bad_texts_are_mended() -> None:
    pytest.importorskip("ftfy")
    bad = "naïve café".encode().decode("latin-1")
    texts = [f"Шостакович\n{bad}\nend", "fine", bad, f"😀\n{bad}"]
    assert [*map(fix_mojibake, texts)] == ["Шостакович\nnaïve café\nend", "fine", "naïve café", "😀\nnaïve café"]
