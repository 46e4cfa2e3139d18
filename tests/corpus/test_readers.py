from __future__ import annotations

import bz2
import functools
import gzip
import http.server
import io
import json
import lzma
import pickle
import random
import struct
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.document_files import make_tar, zip_of
from zero2all.base.errors import UsageError, Z2aError
from zero2all.corpus.mapping import AUTOMATIC
from zero2all.corpus.readers import (
    BrokenRecord,
    RawFile,
    ReadLimits,
    SkippedMember,
    TextRecord,
    UnreadableFileError,
    list_files,
    read_records,
)
from zero2all.corpus.readers import base as readers_base
from zero2all.corpus.readers.encoding import decode_text, detect_encoding, fix_mojibake
from zero2all.corpus.sniff import DetectedFormat, sniff
from zero2all.recipe import SourceRecipe

CHINESE = "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少？白日依山尽，黄河入海流。"
FRENCH = "Déjà vu : l’été, un garçon naïf mangea des crêpes à la crème près du château. "
LINES = [{"id": n, "text": f"第{n}行 line {n}"} for n in range(50)]
SMALL = ReadLimits(
    max_compression_ratio=100, ratio_check_bytes=1 << 20, members=20, member_bytes=4 << 20, total_bytes=16 << 20
)


def read(path: Path, limits: ReadLimits | None = None) -> list[dict[str, Any]]:
    return list(read_records(RawFile.from_path(path), limits))


def contents(path: Path) -> list[str]:
    return [row["content"] for record in read(path) if (row := AUTOMATIC.map_record(record))]


def refusals(path: Path, limits: ReadLimits | None = None) -> dict[str, str]:
    return {r.place.partition("!")[2]: r.reason for r in read(path, limits) if isinstance(r, SkippedMember)}


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def packed(data: bytes, compression: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, compression) as stream:
        stream.write(data)
    whole: bytes = sink.getvalue().to_pybytes()
    return whole


PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".tgz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": functools.partial(packed, compression="zstd"),
    ".lz4": functools.partial(packed, compression="lz4"),
}


SHAPES = {
    "rows.jsonl": as_lines(LINES),
    "rows.json": json.dumps(LINES).encode(),
    "pretty.json": json.dumps(LINES, indent=2, ensure_ascii=False).encode(),
    "lines.json": as_lines(LINES),
    "held.json": json.dumps({"version": 1, "labels": ["a", "b"], "data": LINES}).encode(),
    "in_a_row.json": b"\n".join(json.dumps(row, indent=2).encode() for row in LINES),
    "rows.csv": b"id,text\r\n" + b"".join(f'{r["id"]},"{r["text"]}"\r\n'.encode() for r in LINES),
    "rows.tsv": b"id\ttext\n" + b"".join(f"{r['id']}\t{r['text']}\n".encode() for r in LINES),
    "wiki_00": b"".join(f'<doc id="{r["id"]}" url="u" title="t">\nt\n\n{r["text"]}\n</doc>\n'.encode() for r in LINES),
    # names that say nothing, or something else
    "lines_no_ending": as_lines(LINES),
    "array_no_ending": json.dumps(LINES).encode(),
    "lines.txt": as_lines(LINES),
    "array.jsonl": json.dumps(LINES, indent=1).encode(),
    "one_line_array.jsonl": json.dumps(LINES).encode(),
    "lines.dump.60": as_lines(LINES),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_rows_come_out_of_every_shape(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(SHAPES[name])
    assert contents(tmp_path / name) == [row["text"] for row in LINES]


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst", ".lz4"])
@pytest.mark.parametrize("shape", ["rows.jsonl", "pretty.json", "rows.csv", "wiki_00"])
def test_every_compression_is_seen_through_whatever_the_name_says(tmp_path: Path, ending: str, shape: str) -> None:
    for name in (shape + ending, shape):
        (tmp_path / name).write_bytes(PACK[ending](SHAPES[shape]))
        assert contents(tmp_path / name) == [row["text"] for row in LINES]


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ""])
def test_members_of_archives_are_read_by_the_same_rules(tmp_path: Path, ending: str) -> None:
    parquet = io.BytesIO()
    pq.write_table(pa.table({"text": ["seven"]}), parquet)
    members = {
        "a/rows.jsonl": b'{"text": "one"}\n{"text": \n',
        "a/more.jsonl.gz": gzip.compress(b'{"text": "two"}\n'),
        "./a/f.py": b"def three():\n\treturn 3\n",
        "LICENSE": b"four",
        "table.parquet": parquet.getvalue(),
        "page.html": b"<html><title>T</title><body><p>" + b"eight " * 40 + b"</p></body></html>",
        ".git/config": b"hidden",
        "inner.zip": zip_of({"x.txt": b"never"}),
        "book.mobi": b"BOOKMOBI\x00\x01",
    }
    path = tmp_path / f"all{ending}"
    path.write_bytes(zip_of(members) if ending == ".zip" else PACK[ending.removeprefix(".tar")](make_tar(members)))
    found = read(path)
    texts = [record.get("content") or record.get("text") for record in found if not isinstance(record, BrokenRecord)]
    eight = texts.pop(5)
    assert texts == ["one", "two", members["./a/f.py"].decode(), "four", "seven"]
    assert str(eight).split() == ["eight"] * 40
    broken = [(r.place, r.reason) for r in found if isinstance(r, BrokenRecord) and not isinstance(r, SkippedMember)]
    assert broken == [(f"all{ending}!a/rows.jsonl line 2", "broken JSON")]
    assert refusals(path) == {"inner.zip": "archive inside an archive", "book.mobi": "format .mobi"}


def test_archives_that_mean_harm_are_refused_member_by_member(tmp_path: Path) -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name in ("/etc/passwd.txt", "../up.txt", "a/../../up.txt", "C:\\x.txt", "good.txt"):
            info = tarfile.TarInfo(name)
            info.size = 4
            archive.addfile(info, io.BytesIO(b"text"))
        for name, kind in (("link.txt", tarfile.SYMTYPE), ("hard.txt", tarfile.LNKTYPE), ("null.txt", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    (tmp_path / "bad.tar").write_bytes(sink.getvalue())
    leaves, link = "path that leaves the archive", "link or device"
    escapes = dict.fromkeys(("/etc/passwd.txt", "../up.txt", "a/../../up.txt", "C:\\x.txt"), leaves)
    assert refusals(tmp_path / "bad.tar") == escapes | dict.fromkeys(("link.txt", "hard.txt", "null.txt"), link)
    assert [r["content"] for r in read(tmp_path / "bad.tar") if isinstance(r, TextRecord)] == ["text"]

    data = bytearray(zip_of({"/abs.txt": b"x", "../up.txt": b"x", "..\\up.txt": b"x", "good.txt": b"text"}))
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as zipped:
        zipped.writestr("/abs.txt", "x")
        zipped.writestr("../up.txt", "x")
        member = zipfile.ZipInfo("link.txt")
        member.external_attr = 0o120777 << 16
        zipped.writestr(member, "/etc/passwd")
        zipped.writestr("good.txt", "text")
    assert refusals(tmp_path / "bad.zip") == {"/abs.txt": leaves, "../up.txt": leaves, "link.txt": link}
    # the flag that says a member is encrypted
    place = data.rfind(b"PK\x01\x02", 0, data.rfind(b"good.txt"))
    data[place + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(bytes(data))
    assert refusals(tmp_path / "locked.zip")["good.txt"] == "encrypted"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar", "bad.zip", "locked.zip"]


def test_bombs_are_refused_and_do_not_take_the_rest_with_them(tmp_path: Path) -> None:
    zeros = b" " * (3 << 20)
    (tmp_path / "ratio.zip").write_bytes(zip_of({"bomb.txt": zeros, "good.txt": b"text"}))
    assert refusals(tmp_path / "ratio.zip", SMALL) == {"bomb.txt": "unpacks to more than 100 times its size"}
    assert sum(isinstance(r, TextRecord) for r in read(tmp_path / "ratio.zip", SMALL)) == 1

    # a directory that lies about the size: what comes out is counted as well
    lying = bytearray(zip_of({"bomb.jsonl": b'{"text": "' + zeros + b'"}', "good.txt": b"text"}))
    place = lying.find(b"PK\x01\x02")
    lying[place + 24 : place + 28] = struct.pack("<I", 100)
    (tmp_path / "lying.zip").write_bytes(bytes(lying))
    kept = read(tmp_path / "lying.zip", SMALL)
    assert [r["content"] for r in kept if isinstance(r, TextRecord)] == ["text"]
    assert sum(len(str(r)) for r in kept) < 1 << 20

    large = random.Random(1).randbytes(5 << 20)
    (tmp_path / "large.tar").write_bytes(make_tar({"large.txt": large, "good.txt": b"text"}))
    assert refusals(tmp_path / "large.tar", SMALL) == {"large.txt": "unpacks to more than 4 MiB"}

    many = {f"{n}.txt": b"x" for n in range(30)}
    (tmp_path / "many.tar").write_bytes(make_tar(many))
    assert refusals(tmp_path / "many.tar", SMALL) == {"": "more than 20 members"}
    assert sum(isinstance(r, TextRecord) for r in read(tmp_path / "many.tar", SMALL)) == 20
    (tmp_path / "many.zip").write_bytes(zip_of(many))
    with pytest.raises(UnreadableFileError, match="more than 20 members"):
        read(tmp_path / "many.zip", SMALL)

    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(make_tar({"a.txt": b"text", "b.jsonl": b" " * (3 << 20)})))
    assert set(refusals(tmp_path / "bomb.tar.gz", SMALL).values()) == {"unpacks to more than 100 times its size"}

    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b'{"text": "first"}\n' + b"\n" * (5 << 20)))
    records = read_records(RawFile.from_path(tmp_path / "bomb.jsonl.gz"), SMALL)
    assert next(records) == {"text": "first"}
    with pytest.raises(UnreadableFileError, match="100 times"):
        next(records)


def test_a_tar_header_that_claims_gigabytes_is_not_read_into_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 3 << 30
    (tmp_path / "long.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"a" * 4096)
    with pytest.raises(UnreadableFileError, match="header too large"):
        read(tmp_path / "long.tar")


def test_large_members_of_a_tar_are_read(tmp_path: Path) -> None:
    book, rows = "a line of a book\n" * 200_000, [{"text": "x" * 100}] * 20_000
    members = {"small.txt": b"small", "book.txt": book.encode(), "rows.json": json.dumps(rows).encode()}
    (tmp_path / "a.tar").write_bytes(make_tar(members | {"z.txt": b"after"}))
    found = contents(tmp_path / "a.tar")
    assert (found[0], found[1], len(found[2:-1]), found[-1]) == ("small", book, 20_000, "after")


def test_a_mended_line_may_hold_half_a_surrogate_pair(tmp_path: Path) -> None:
    texts = ["before", "Ã©tÃ© dÃ©jÃ\xa0 vu naÃ¯ve \ud83d abc", "after"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = read(tmp_path / "a.jsonl")
    assert [record["text"] for record in found] == ["before", "été déjà vu naïve \ud83d abc", "after"]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.tar.gz", b"", "empty file"),
        ("a.parquet", b"PAR1", "broken file"),
        ("b.parquet", b"no", "not parquet"),
        ("a.zip", b"PK\x03\x04 cut short", "broken archive"),
        ("a.tar", b"no tar", "not tar"),
        ("a.jsonl.gz", b"not gzip", "not gzip"),
        ("b.jsonl.gz", gzip.compress(as_lines(LINES))[:-20], "broken file"),
        ("a.jsonl.zst", packed(as_lines(LINES), "zstd")[:-20], "broken file"),
        ("a.jsonl.xz", lzma.compress(as_lines(LINES))[:-20], "broken file"),
        ("a.json", b'{"text": ', "broken JSON"),
        ("b.json", b"[{,,,", "broken JSON"),
        ("a.mobi", b"BOOKMOBI\x00\x01", "format .mobi"),
        ("a.xlsx", zip_of({"xl/workbook.xml": b"<x/>"}), "format .xlsx"),
        ("a.pdf", b"BOOKMOBI\x00\x01", "not pdf, though named so"),
        ("a.docx", b"BOOKMOBI\x00\x01", "not docx, though named so"),
        ("a.xml", b"<x>text</x>", "format .xml"),
        ("a.txt", b"\x00\x01\x02" * 50, "binary"),
        ("a.csv", b"one column\nx\n", "without columns"),
        ("b.csv", b"a,a\n1,2\n", "without a header"),
        ("c.csv", b"id,text\r1,hello\r2,world\r", "without a header"),
        ("b.txt", "Широкая электрификация южных губерний".encode("cp1251"), "unknown encoding"),
        ("a.warc", b"WARC/1.0\r\nno end", "broken WARC"),
    ],
)
def test_every_refusal_has_its_reason(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UnreadableFileError, match=reason):
        read(tmp_path / name)


def test_a_broken_record_says_where_it_is_and_spares_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": \n[1]\n{"text": "\xff"}\n\n{"text": "end"}')
    found = read(tmp_path / "a.jsonl")
    assert [r["text"] for r in found if not isinstance(r, BrokenRecord)] == ["good", "ÿ", "end"]  # cp1252 as a whole
    assert [(r.place, r.reason) for r in found if isinstance(r, BrokenRecord)] == [
        ("line 2", "broken JSON"),
        ("line 3", "not an object"),
    ]
    (tmp_path / "b.jsonl").write_bytes((CHINESE * 99).join(['{"text": "', '"}\n']).encode() + b'{"text": "\xff"}\n')
    assert [r.reason for r in read(tmp_path / "b.jsonl")[1:] if isinstance(r, BrokenRecord)] == ["not UTF-8"]

    (tmp_path / "c.json").write_text('[{"text": "a"},\n {"text" "b"},\n {"text": "c"}, 5,\n {"text": "d"},\n]')
    found = read(tmp_path / "c.json")
    assert [r["text"] for r in found if not isinstance(r, BrokenRecord)] == ["a", "c", "d"]
    assert [r.reason for r in found if isinstance(r, BrokenRecord)] == ["broken JSON", "not an object"]
    assert next(r.raw for r in found if isinstance(r, BrokenRecord)).startswith('{"text" "b"}')

    (tmp_path / "d.csv").write_text('id,text\n1,one\n2,two,three\n3,"four\nlines, and more"\n')
    found = read(tmp_path / "d.csv")
    assert [r["text"] for r in found if not isinstance(r, BrokenRecord)] == ["one", "four\nlines, and more"]
    assert [(r.place, r.reason) for r in found if isinstance(r, BrokenRecord)] == [
        ("line 3", "row that does not fit the header")
    ]
    assert pickle.loads(pickle.dumps(found)) == found


def test_what_is_too_long_for_one_record_is_passed_over_or_cut(tmp_path: Path) -> None:
    limits = ReadLimits(record_bytes=1 << 16, max_document_characters=1 << 16)
    long = {"text": "x" * (3 << 20)}
    rows = [{"text": "before"}, long, {"text": "after"}]
    for name, data in (("a.jsonl", as_lines(rows)), ("a.json", json.dumps(rows).encode())):
        (tmp_path / name).write_bytes(data)
        found = read(tmp_path / name, limits)
        assert [r["text"] for r in found if not isinstance(r, BrokenRecord)] == ["before", "after"]
    text = "".join(f"line {n} 行\n" for n in range(20_000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    chunks = [record["content"] for record in read(tmp_path / "a.txt", limits)]
    assert len(chunks) > 1
    assert "".join(chunks) == text
    assert all(chunk.endswith("\n") for chunk in chunks)


def test_large_json_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that lie across the edges of blocks, and the streaming way to a list inside an object."""
    rows = [{"id": n, "text": f'{n} \\ " {CHINESE * (n % 300)}'} for n in range(400)]
    monkeypatch.setattr("zero2all.corpus.readers.json_records.MAX_IN_MEMORY_BYTES", 1 << 16)
    first = {"meta": {"list": [1, 2], "x": {}}, "licences": [{"name": "MIT"}]}
    shapes = {"array": rows, "held": {**first, "rows": rows, "last": [{"name": "x"}] * 9}}
    for name, value in shapes.items():
        for indent in (None, 2):
            (tmp_path / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False, indent=indent))
            assert read(tmp_path / f"{name}.json") == rows
    (tmp_path / "row.json").write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    assert read(tmp_path / "row.json") == rows
    (tmp_path / "cut.json").write_text(json.dumps(shapes["held"])[:-500_000])
    found = read(tmp_path / "cut.json")
    assert 10 < len(found) < 400
    assert isinstance(found[-1], BrokenRecord)


def test_parquet_of_every_odd_type_is_read(tmp_path: Path) -> None:
    when = pa.array([1_700_000_000_000_000_001] * 3, pa.timestamp("ns"))
    nested = pa.StructArray.from_arrays([when, pa.array(["T"] * 3)], names=["when", "title"])
    text = pa.array([b"good", b"\xff\xfe", "中文".encode()], pa.binary()).view(pa.string())
    columns = {"text": text, "when": when, "meta": nested, "took": when.cast(pa.int64()).view(pa.duration("ns"))}
    columns["picture"] = pa.array([b"\xff\xd8", b"", b"as bytes"], pa.binary())
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    good, broken, chinese = read(tmp_path / "a.parquet")
    assert isinstance(broken, BrokenRecord)
    assert (broken.reason, broken.place) == ("not UTF-8", "row 1")
    assert (good["text"], good["meta"]["title"], good["picture"]) == ("good", "T", None)
    assert good["when"].startswith("2023-11-14 22:13:20.000000001")
    assert good["meta"]["when"] == good["when"]
    assert (chinese["text"], chinese["picture"]) == ("中文", "as bytes")


def test_html_gives_main_text_and_title(tmp_path: Path) -> None:
    body = f"<nav><a href='/'>home</a></nav><main><h1>H</h1><p>{CHINESE * 5}</p></main><script>var x</script>"
    page = f"<!DOCTYPE html><html><head><meta charset=gb2312><title>题 &amp; T</title></head><body>{body}</body></html>"
    for name, data in (("a.html", page.encode("gb18030")), ("b", page.replace("=gb2312", "=x").encode())):
        (tmp_path / name).write_bytes(data)
        (record,) = read(tmp_path / name)
        assert (record["title"], record["raw_bytes"]) == ("题 & T", len(data))
        assert CHINESE in record["content"]
        assert "var x" not in record["content"]


def test_warc_gives_its_html_responses(tmp_path: Path) -> None:
    page = f"<html><title>T</title><body><p>{FRENCH * 5}</p></body></html>".encode()
    chunked = b"".join(
        f"{len(page[i : i + 100]):x}\r\n".encode() + page[i : i + 100] + b"\r\n" for i in range(0, len(page), 100)
    )
    html = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n"
    bodies = {
        "chunked": html + b"Transfer-Encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n",
        "unchunked": html + b"Transfer-Encoding: chunked\r\n\r\n" + page,
        "packed": html + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(page),
        "picture": b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n\x89PNG",
        "headless": b"nothing",
        "unknown": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"
        + "Широкая электрификация губерний".encode("cp1251"),
        "back": html + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n-5\r\n",
        "after": html + b"\r\n" + page,
    }
    records = [b"WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 3\r\n\r\nabc\r\n\r\n"]
    for name, body in bodies.items():
        head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <{name}>\r\nWARC-Target-URI: http://x/{name}\r\n"
        head += f"Content-Type: application/http;msgtype=response\r\nContent-Length: {len(body)}\r\n\r\n"
        records.append(head.encode() + body + b"\r\n\r\n")
    (tmp_path / "a.warc.gz").write_bytes(b"".join(gzip.compress(record) for record in records))
    found = read(tmp_path / "a.warc.gz")
    assert [r["id"] for r in found if isinstance(r, TextRecord)] == ["chunked", "unchunked", "packed", "after"]
    assert all(FRENCH.strip() in r["content"] for r in found if isinstance(r, TextRecord))
    assert found[0]["url"] == "http://x/chunked"
    assert [r.place for r in found if isinstance(r, BrokenRecord)] == ["headless", "unknown", "back"]
    (tmp_path / "cut.warc").write_bytes(b"".join(records)[:-8])
    last = read(tmp_path / "cut.warc")[-1]
    assert isinstance(last, BrokenRecord)
    assert last.reason == "WARC record cut short"


@pytest.mark.parametrize(
    ("text", "encoding", "found"),
    [
        (CHINESE, "utf-8", "utf-8"),
        (CHINESE, "utf-8-sig", "utf-8-sig"),
        (CHINESE, "utf-16", "utf-16"),
        (CHINESE, "gb18030", "gb18030"),
        ("问", "gb18030", "gb18030"),
        ("a long line of English and then 中文", "gb18030", "gb18030"),
        ("plain", "ascii", "ascii"),
        (FRENCH, "cp1252", "cp1252"),
        ("Ärger über Öl, Füße und Größe, café", "latin-1", "cp1252"),
        ("café", "latin-1", "cp1252"),
        ("¿Qué pasó, señor? El niño comió piñas mañana.", "latin-1", "cp1252"),
    ],
)
def test_encodings_are_found_out(tmp_path: Path, text: str, encoding: str, found: str) -> None:
    data = text.encode(encoding)
    assert detect_encoding(data, is_complete=True).name == found
    assert decode_text(data).lstrip("\ufeff") == text
    (tmp_path / "a.txt").write_bytes(data)
    assert [record["content"].lstrip("\ufeff") for record in read(tmp_path / "a.txt")] == [text]
    (tmp_path / "a.jsonl").write_bytes("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n").encode(encoding))
    assert [record["text"] for record in read(tmp_path / "a.jsonl")] == [text]


def test_a_few_damaged_characters_do_not_change_the_encoding() -> None:
    data = (CHINESE * 100).encode() + b"\xff" + (CHINESE * 100).encode()
    assert decode_text(data) == CHINESE * 100 + "\ufffd" + CHINESE * 100
    late = b"plain ascii\n" * 200_000 + (CHINESE * 10).encode("gb18030")
    assert decode_text(late).endswith(CHINESE)


def test_mojibake_is_mended_and_nothing_else_is_touched(shared_corpus: Path) -> None:
    wild = json.loads((shared_corpus / "dirty/mojibake/ftfy_in_the_wild.json").read_text())
    checked = 0
    for case in wild:
        if case["expect"] == "pass":
            assert fix_mojibake(case["original"]) == case.get("fixed-encoding", case["fixed"]), case["label"]
            checked += 1
    assert checked > 60
    for case in json.loads((shared_corpus / "dirty/mojibake/ftfy_negative.json").read_text()):
        if case["expect"] == "pass" and case["original"] == case["fixed"]:
            assert fix_mojibake(case["original"]) == case["original"], case["label"]
    for name in ("zh/txt/三国演义.txt", "zh/wiki2019zh_style/wiki_zh_00.jsonl", "en/books/Jane-Eyre_1260.txt"):
        text = (shared_corpus / name).read_bytes().decode("utf-8-sig")
        assert fix_mojibake(text) == text


def test_mojibake_is_mended_in_records_but_not_in_code(tmp_path: Path) -> None:
    bad = "schÃ¶n – l’été"
    (tmp_path / "a.txt").write_text(f"{FRENCH}\n{bad}\n", encoding="utf-8")
    assert read(tmp_path / "a.txt")[0]["content"] == f"{FRENCH}\nschön – l’été\n"
    (tmp_path / "a.py").write_text(bad, encoding="utf-8")
    assert read(tmp_path / "a.py")[0]["content"] == bad
    (tmp_path / "a.jsonl").write_bytes(as_lines([{"path": "x/y.py", "content": bad}, {"code": bad}, {"text": bad}]))
    assert [list(record.values())[-1] for record in read(tmp_path / "a.jsonl")] == [bad, bad, "schön – l’été"]


def test_without_the_extra_only_what_needs_it_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(module: str, extra: str) -> Any:
        raise Z2aError(f"this needs {module}: pip install 'zero2all[{extra}]'")

    monkeypatch.setattr(readers_base, "need", absent)
    (tmp_path / "a.json").write_text(json.dumps(LINES))
    (tmp_path / "a.html").write_text("<html><p>x</p></html>")
    (tmp_path / "a.jsonl").write_bytes(as_lines([{"text": "une œuvre"}, {"text": "schÃ¶n"}]))
    assert len(read(tmp_path / "a.json")) == len(LINES)
    with pytest.raises(UnreadableFileError, match=r"needs pip install 'zero2all\[corpus\]'"):
        read(tmp_path / "a.html")
    good, bad = read(tmp_path / "a.jsonl")
    assert good == {"text": "une œuvre"}
    assert isinstance(bad, BrokenRecord)
    assert bad.reason == "needs pip install 'zero2all[corpus]'"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    (tmp_path / "web").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path / "web", f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_file_on_the_web_is_read_like_a_local_one(web: tuple[Path, str]) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    directory, address = web
    (directory / "rows.jsonl.gz").write_bytes(gzip.compress(SHAPES["rows.jsonl"]))
    (file,) = list_files(SourceRecipe(name="s", paths=[f"{address}/rows.jsonl.gz"]))
    assert file.name == "rows.jsonl.gz"
    assert list(read_records(pickle.loads(pickle.dumps(file)))) == LINES
    with pytest.raises(UsageError, match="nothing at"):
        list_files(SourceRecipe(name="s", paths=[f"{address}/none.jsonl"]))


def test_remote_directories_and_globs_are_listed() -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    pq.write_table(pa.table({"text": ["one"]}), memory.open("/z2a/deep/a.parquet", "wb"))
    for name, data in (("b.jsonl", SHAPES["rows.jsonl"]), ("c.zip", zip_of({"x.txt": b"two"})), (".hidden/d.txt", b"")):
        memory.pipe(f"/z2a/{name}", data)
    files = list_files(SourceRecipe(name="s", paths=["memory://z2a"], exclude=["*.zip"]))
    assert [file.name for file in files] == ["b.jsonl", "deep/a.parquet"]
    assert sum(1 for file in files for _ in read_records(file)) == 51
    (zipped,) = list_files(SourceRecipe(name="s", paths=["memory://z2a/*.zip"]))
    assert [record["content"] for record in read_records(zipped)] == ["two"]
    assert zipped.fingerprint.startswith(str(zipped.bytes))
    memory.rm("/z2a", recursive=True)


def test_a_fingerprint_changes_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = RawFile.from_path(tmp_path / "a.txt").fingerprint
    assert RawFile.from_path(tmp_path / "a.txt").fingerprint == before
    (tmp_path / "a.txt").write_text("three")
    assert RawFile.from_path(tmp_path / "a.txt").fingerprint != before


# Documents in the corpus's own table, and where reading gives another number, why.
TABLE = {"zh": 28_197, "en": 7_431, "code": 2_615, "valid": 919, "dirty": 3_102}
DIFFERENCES = {
    "zh": {
        "史记.txt is one file; its 130 chapters are not cut apart": -129,
        "redirects of wiki_60, which have a title and no text": -541,
    },
    "en": {},
    "code": {
        "LICENSES.txt is one file of 14 texts": -13,
        "LICENSE.txt in the tar file, which the table does not count": +1,
        "licences and notices in the zip file, which the table does not count": +18,
    },
    "valid": {"valid.txt and test.txt of wikitext-2 are two files of 60 and 62 articles": -120},
    "dirty": {
        "the WARC file has 9 records; 4 are responses, the rest requests and the information record": -5,
        "the malformed array has a comma too many at its end; its elements are valid": +2_801,
    },
}


@pytest.mark.parametrize("part", TABLE)
def test_every_file_of_the_shared_corpus_is_read(shared_corpus: Path, part: str) -> None:
    documents: Counter[str] = Counter()
    for file in list_files(SourceRecipe(name=part, paths=[str(shared_corpus / part)])):
        for record in read_records(file):
            assert not isinstance(record, BrokenRecord), (file.name, record)
            documents["read" if AUTOMATIC.map_record(record) else "without text"] += 1
    assert documents["read"] == TABLE[part] + sum(DIFFERENCES[part].values())
    assert documents["without text"] == (541 if part == "zh" else 0)


def test_hard_files_of_the_shared_corpus_say_what_they_should(shared_corpus: Path) -> None:
    dracula = read(shared_corpus / "dirty/encoding/dracula_345-8.latin1.txt")[0]["content"]
    assert dracula == (shared_corpus / "dirty/encoding/dracula_345-8.latin1.txt").read_bytes().decode("latin-1")
    rows = read(shared_corpus / "dirty/encoding/medical_qa_head.gb18030.csv")
    same = read(shared_corpus / "zh/baike2018qa_style/baike_qa_train.jsonl")
    titles = {row["title"] for row in same}
    assert sum(row["title"] in titles for row in rows) > 0.8 * len(rows)
    assert rows[0]["title"] == "高血压患者能吃党参吗？"
    assert len(read(shared_corpus / "dirty/near_dup/frankenstein_editions.jsonl.zst")) == 12
    with tarfile.open(shared_corpus / "code/cpython_stdlib_3.11.7.tar.gz") as archive:
        own = {name: stream.read() for name in archive.getnames() if (stream := archive.extractfile(name))}
    for record in read(shared_corpus / "code/cpython_stdlib_3.11.7.tar.gz"):
        name = record["id"].partition("!")[2]
        try:
            assert record["content"] == own[name].decode("utf-8-sig")
        except UnicodeDecodeError:  # two modules that are meant not to be UTF-8
            assert record["content"] == own[name].decode("cp1252")


def test_sniff_proposes_a_source_that_works(tmp_path: Path, shared_corpus: Path) -> None:
    found = sniff(shared_corpus / "zh/news2016zh_style/news_zh_train_extra.jsonl.gz")
    assert found.detected == DetectedFormat("jsonl", "gzip", "utf-8")
    assert found.content is not None
    assert found.content.mapping == "new2016zh"
    assert "mapping: new2016zh" in found.content.source
    assert found.content.preview["content"]
    (tmp_path / "odd.jsonl").write_bytes(as_lines([{"url": "http://" + "x" * 99, "meta": {"story": "text " * 9}}]))
    assert sniff(tmp_path / "odd.jsonl").to_json()["mapping_fields"] == {"content": "meta.story"}
    (tmp_path / "a.bin").write_bytes(b"\x00\x01")
    assert sniff(tmp_path / "a.bin").unreadable == "format .bin"
    with pytest.raises(UsageError, match="nothing at"):
        sniff(tmp_path / "none")
