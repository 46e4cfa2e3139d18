"""Files that are damaged, lie about themselves, or unpack to far more than they are: made when a test runs."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import socket
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

Maker = Callable[[], bytes]
MEBIBYTE = 1 << 20
LINE = b'{"text": "An ordinary line of text that is there to be read."}\n'


def compressed(codec: str, data: bytes) -> bytes:
    return bytes(pa.Codec(codec).compress(data, asbytes=True))


def zip_of(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


def nested_zip(levels: int) -> bytes:
    data = zip_of({"a.txt": b"0" * MEBIBYTE})
    for level in range(levels):
        data = zip_of({f"{level}-{copy}.zip": data for copy in range(4)})
    return data


def tar_of(*members: tarfile.TarInfo, content: bytes = b"text", compression: str = "") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as archive:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return data.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def parquet_of(**columns: object) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table(columns), data)
    return data.getvalue()


def arrow_of(**columns: object) -> bytes:
    data, table = io.BytesIO(), pa.table(columns)
    with pa.ipc.new_file(data, table.schema) as writer:
        writer.write_table(table)
    return data.getvalue()


def flipped(data: bytes, at: float) -> bytes:
    changed = bytearray(data)
    for place in range(int(len(data) * at), min(len(data), int(len(data) * at) + 16)):
        changed[place] ^= 0xFF
    return bytes(changed)


def deep(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


def warc(headers: bytes, body: bytes = b"") -> bytes:
    return b"WARC/1.0\r\nWARC-Type: response\r\n" + headers + b"\r\n\r\n" + body + b"\r\n\r\n"


PARQUET = parquet_of(text=["one", "two"] * 50)
ARROW = arrow_of(text=["one", "two"] * 50)
HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><body><p>text</p></body></html>"
STORED = zip_of({"a.txt": b"some text"}, zipfile.ZIP_STORED)
OUTSIDE = {"../../out.txt": b"out", "/etc/out.txt": b"out", "C:\\out.txt": b"out"}
LINKS = (member("a.txt", tarfile.SYMTYPE, "/etc/passwd"), member("b.txt", tarfile.LNKTYPE, "/etc/passwd"))
DEVICES = (member("a.txt", tarfile.CHRTYPE), member("b.txt", tarfile.BLKTYPE), member("c.txt", tarfile.FIFOTYPE))
COLLIDING = "{" + ",".join(f'"{n * (2**61 - 1)}":1' for n in range(20_000)) + "}"
READER_FILES: dict[str, tuple[str, Maker]] = {
    # Compression
    "gzip bomb": ("a.jsonl.gz", lambda: gzip.compress(b"0" * (80 * MEBIBYTE), 6)),
    "gzip of gzip bomb": ("a.txt.gz", lambda: gzip.compress(gzip.compress(b"0" * (80 * MEBIBYTE), 6), 6)),
    "bzip2 bomb": ("a.txt.bz2", lambda: bz2.compress(b"0" * (80 * MEBIBYTE))),
    "xz bomb": ("a.txt.xz", lambda: lzma.compress(b"0" * (80 * MEBIBYTE), preset=0)),
    "zstd bomb": ("a.txt.zst", lambda: compressed("zstd", b"0" * (80 * MEBIBYTE))),
    "gzip bomb of lines": ("a.jsonl.gz", lambda: gzip.compress(LINE * 400_000, 6)),
    "gzip cut short": ("a.jsonl.gz", lambda: gzip.compress(LINE * 100)[:-9]),
    "gzip flipped": ("a.jsonl.gz", lambda: flipped(gzip.compress(os.urandom(5000)), 0.5)),
    "gzip of nothing": ("a.jsonl.gz", lambda: gzip.compress(b"")),
    "zstd cut short": ("a.jsonl.zst", lambda: compressed("zstd", LINE * 100)[:-5]),
    "xz that wants gigabytes": ("a.txt.xz", lambda: lzma.compress(b"x" * 1000, preset=9 | lzma.PRESET_EXTREME)),
    "many gzip members": ("a.txt.gz", lambda: gzip.compress(b"x") * 20_000),
    # zip
    "zip bomb": ("a.zip", lambda: zip_of({"a.txt": b"0" * (80 * MEBIBYTE)})),
    "zip of many bombs": ("a.zip", lambda: zip_of({f"{n}.txt": b"0" * (8 * MEBIBYTE) for n in range(12)})),
    "zips in zips": ("a.zip", lambda: nested_zip(5)),
    "zip out of its folder": ("a.zip", lambda: zip_of(OUTSIDE)),
    "zip of a long name": ("a.zip", lambda: zip_of({"x" * 60_000 + ".txt": b"text"})),
    "zip with NUL in a name": ("a.zip", lambda: zip_of({"a.txt": b"text"}).replace(b"a.txt", b"\0.txt")),
    "zip of many members": ("a.zip", lambda: zip_of({f"{n}": b"" for n in range(5_000)}, zipfile.ZIP_STORED)),
    "zip cut short": ("a.zip", lambda: zip_of({"a.txt": b"text" * 1000})[:-30]),
    "zip with a lying size": ("a.zip", lambda: flipped(zip_of({"a.txt": b"text" * 1000}), 0.9)),
    "zip with wrong checksum": ("a.zip", lambda: STORED.replace(b"some text", b"some tent")),
    # tar
    "tar out of its folder": ("a.tar", lambda: tar_of(*map(member, ("../out.txt", "/out.txt", "a/../../out.txt")))),
    "tar with links": ("a.tar", lambda: tar_of(*LINKS)),
    "tar with devices": ("a.tar", lambda: tar_of(*DEVICES)),
    "tar of a long name": ("a.tar", lambda: tar_of(member("x" * 5000 + ".txt"))),
    "tar with a negative size": ("a.tar", lambda: _tar_size(b"-0000000001\0")),
    "tar with a huge size": ("a.tar", lambda: _tar_size(b"\x80" + b"\0" * 3 + b"\xff" * 8)),
    "tar with an odd size": ("a.tar", lambda: _tar_size(b"hello world\0")),
    "tar.gz bomb": ("a.tar.gz", lambda: tar_of(member("a.txt"), content=b"0" * (80 * MEBIBYTE), compression="gz")),
    "tar cut short": ("a.tar", lambda: tar_of(member("a.txt"), content=b"text" * 5000)[:6000]),
    "tar of pax tricks": ("a.tar", lambda: _pax({"size": "99999999999999999999", "path": "../" * 50 + "x"})),
    # JSON
    "deep JSON": ("a.json", lambda: deep(100_000).encode()),
    "deep JSON objects": ("a.json", lambda: ('{"a":' * 50_000 + "1" + "}" * 50_000).encode()),
    "deep JSON without end": ("a.json", lambda: b"[" * 500_000),
    "deep JSON lines": ("a.jsonl", lambda: (f'{{"text":"a","x":{deep(1020)}}}\n' * 3).encode()),
    "a number of 100,000 digits": ("a.jsonl", lambda: b'{"text":"a","n":' + b"9" * 100_000 + b"}\n"),
    "exponents": ("a.jsonl", lambda: b'{"text":"a","n":1e999999999,"m":-1e-999999}\n' * 10),
    "a key many times": ("a.jsonl", lambda: b"{" + b",".join([b'"text":"a"'] * 50_000) + b"}\n"),
    "keys that collide": ("a.jsonl", COLLIDING.encode),
    "many broken elements": ("a.json", lambda: b"[" + b"{,}," * 50_000 + b"{}]"),
    "lone surrogates": ("a.jsonl", lambda: b'{"text":"\\ud800 and \\udfff"}\n'),
    "NUL in JSON": ("a.jsonl", lambda: b'{"text":"a\\u0000b"}\n{"te\\u0000xt":"b"}\n'),
    "JSON that ends in a string": ("a.json", lambda: b'[{"text":"' + b"x" * 500_000),
    "blank lines": ("a.jsonl", lambda: b"\n" * 300_000 + LINE),
    "JSON with NaN": ("a.jsonl", lambda: b'{"text":"a","n":NaN,"i":Infinity}\n'),
    # one long line and odd bytes
    "a line of 80 MiB": ("a.jsonl", lambda: b'{"text":"' + b"x" * (80 * MEBIBYTE)),
    "text in one line": ("a.txt", lambda: b"x" * (30 * MEBIBYTE)),
    "NUL bytes": ("a.txt", lambda: b"\0" * MEBIBYTE),
    "random bytes": ("a.txt", lambda: bytes(range(256)) * 4000),
    "UTF-16 without a mark": ("a.txt", lambda: ("text " * 500).encode("utf-16-le")),
    "half a UTF-16": ("a.txt", lambda: b"\xff\xfe" + ("text" * 50).encode("utf-16-le")[:-1]),
    "UTF-32": ("a.txt", lambda: ("text " * 500).encode("utf-32")),
    "overlong UTF-8": ("a.txt", lambda: b"\xc0\xaf\xe0\x80\xaf" * 500),
    "UTF-7": ("a.txt", lambda: b"+ADw-script+AD4-" * 100),
    "marks of direction": ("a.txt", lambda: ("\u202e\u2066\u200f text \x1b[31m" * 500).encode()),
    # CSV
    "CSV with an open quote": ("a.csv", lambda: b'text,b\n"' + b"x,y\n" * 500_000),
    "CSV with a field of 10 MB": ("a.csv", lambda: b'text,b\n"' + b"x" * 10_000_000 + b'",1\n'),
    "CSV of many columns": ("a.csv", lambda: b"text," + b"a," * 100_000 + b"\n" + b"1," * 100_000),
    "CSV with NUL": ("a.csv", lambda: b"text,b\n\0,\0\n"),
    "CSV of quotes": ("a.csv", lambda: b"text,b\n" + b'"' * 500_001),
    # Parquet and Arrow
    "Parquet cut short": ("a.parquet", lambda: PARQUET[:-20]),
    "Parquet without its head": ("a.parquet", lambda: PARQUET[200:]),
    "Parquet with a flipped footer": ("a.parquet", lambda: flipped(PARQUET, 0.8)),
    "Parquet with flipped data": ("a.parquet", lambda: flipped(PARQUET, 0.05)),
    "Parquet with a footer of 4 GiB": ("a.parquet", lambda: PARQUET[:-8] + b"\xff\xff\xff\x7fPAR1"),
    "Parquet of 3000 columns": ("a.parquet", lambda: parquet_of(**{f"c{n}": ["x"] for n in range(3000)})),
    "Arrow cut short": ("a.arrow", lambda: ARROW[:-30]),
    "Arrow with flipped metadata": ("a.arrow", lambda: flipped(ARROW, 0.02)),
    "Arrow with flipped data": ("a.arrow", lambda: flipped(ARROW, 0.5)),
    "Arrow with a huge length": ("a.arrow", lambda: ARROW[:8] + struct.pack("<iI", -1, 0x7FFFFFF0) + ARROW[16:]),
    # WARC and HTML
    "WARC with a negative length": ("a.warc", lambda: warc(b"Content-Length: -5", HTTP)),
    "WARC with a huge length": ("a.warc", lambda: warc(b"Content-Length: 99999999999999999999", HTTP)),
    "WARC with a length of letters": ("a.warc", lambda: warc(b"Content-Length: many", HTTP)),
    "WARC with an endless header": ("a.warc", lambda: b"WARC/1.0\r\nX: " + b"x" * 3_000_000),
    "WARC cut short": ("a.warc", lambda: warc(b"Content-Length: 5000", HTTP)),
    "HTML of nested tags": ("a.html", lambda: b"<div>" * 50_000 + b"text"),
    "HTML of attributes": ("a.html", lambda: b"<html><body><p " + b"a=b " * 50_000 + b">text</p>"),
    "HTML of comments": ("a.html", lambda: b"<!--" * 50_000),
    "HTML of entities": ("a.html", lambda: b"<html><body><p>" + b"&amp;" * 100_000 + b"&#x110000;&#0;&notthere;"),
    "HTML of tables": ("a.html", lambda: b"<html><body>" + b"<table><tr><td>" * 3_000),
    # wrong names
    "a program named text": ("a.txt", lambda: b"\x7fELF" + os.urandom(20_000)),
    "a picture named JSON": ("a.json", lambda: b"\x89PNG\r\n\x1a\n" + os.urandom(5000)),
    "a PDF of nothing": ("a.pdf", lambda: b"%PDF-1.7\n%%EOF"),
    "a pickle named text": ("a.txt", lambda: b"\x80\x04\x95" + os.urandom(200)),
    "empty": ("a.jsonl", lambda: b""),
}  # fmt: skip

# Those that take seconds, most of them to make.
LONG_FILES = {
    "gzip bomb of lines", "gzip of gzip bomb", "bzip2 bomb", "xz bomb", "tar.gz bomb", "zip of many bombs",
    "Parquet of 3000 columns", "zip of many members",
}  # fmt: skip


def _tar_size(field: bytes) -> bytes:
    data = bytearray(tar_of(member("a.txt"), content=b"text" * 100))
    data[124:136] = field
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def _pax(headers: dict[str, str]) -> bytes:
    info, data = member("a.txt"), io.BytesIO()
    info.pax_headers = headers
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info.size = 4
        archive.addfile(info, io.BytesIO(b"text"))
    return data.getvalue()


def _socket(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket.txt")
    finally:
        os.chdir(here)


def _named(*names: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text("An odd name.\n")

    return make


def _many(folder: Path) -> None:
    for number in range(2000):
        (folder / f"{number}.txt").touch()


def _deep_folders(folder: Path) -> None:
    here = os.getcwd()
    try:
        for _ in range(200):
            os.chdir(folder)
            folder = Path("d" * 30)
            folder.mkdir()
    finally:
        os.chdir(here)


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "a FIFO": lambda folder: os.mkfifo(folder / "pipe.txt"),
    "a socket": _socket,
    "a link to /dev/zero": lambda folder: (folder / "zero.txt").symlink_to("/dev/zero"),
    "a link to /dev/null": lambda folder: (folder / "null.txt").symlink_to("/dev/null"),
    "a link to /etc/passwd": lambda folder: (folder / "passwd.txt").symlink_to("/etc/passwd"),
    "a link to nothing": lambda folder: (folder / "gone.txt").symlink_to(folder / "nowhere"),
    "a link to itself": lambda folder: (folder / "loop.txt").symlink_to(folder / "loop.txt"),
    "a folder in itself": lambda folder: (folder / "again").symlink_to(folder),
    "a link to the root": lambda folder: (folder / "root").symlink_to("/"),
    "a link to /proc": lambda folder: (folder / "proc").symlink_to("/proc/self"),
    "a name with a line end": _named(b"a\nb.txt"),
    "a name of invalid bytes": _named(b"\xff\xfe.txt"),
    "a name of shell characters": _named(b"$(touch x);`id`&|.txt", b"-rf.txt", b"*?[a].txt", b"'\".txt"),
    "a name of emoji and direction": _named("😀\u202etxt.exe".encode() + b".txt"),
    "a name of 255 bytes": _named(b"x" * 251 + b".txt"),
    "a name with escapes": _named(b"\x1b[2J\x07.txt"),
    "a folder of that name": lambda folder: (folder / "folder.jsonl").mkdir(),
    "a file nobody may read": lambda folder: (folder / "locked.txt").touch(mode=0),
    "folders 200 deep": _deep_folders,
    "2000 empty files": _many,
}


def _repeat(before: str, unit: str, after: str = "") -> Callable[[int], bytes]:
    return lambda size: (before + unit * (size // len(unit)) + after).encode()


# What a parser may take quadratic time for: a file name, and the content by its size.
COMPLEXITY: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "comments before a fragment": ("a.txt", _repeat("", "<!-- x -->\n", "<p")),
    "scripts of a template": ("a.html", _repeat("<html><body>", "<script type=text/html>")),
    "openings of scripts": ("a.html", _repeat("<html><body>", "<script ")),
    "attributes without an end": ("a.html", _repeat("<html><body><a ", "a=")),
    "blank lines in JSON": ("a.json", _repeat('[{"text": "a"', "\n \n", "{")),
    "broken elements": ("a.json", _repeat("[", "{,},", "{}]")),
    "nesting without an end": ("a.json", _repeat('[{"text":', "[")),
    "objects without an end": ("a.json", _repeat("[", '{"a":')),
    "nested divisions": ("a.html", _repeat("<html><body>", "<div>", "text")),
    "nested styles": ("a.html", _repeat("<html><body>", "<b><i><a>", "text")),
    "open brackets in Markdown": ("a.md", _repeat("", "[a](", "x")),
    "quotes in a table": ("a.csv", _repeat('text,b\n"', '""', "\n")),
    "white space": ("a.txt", _repeat("x", " ", "x")),
    "line ends of two kinds": ("a.txt", _repeat("", "\r\n\r", "x")),
    "mail addresses without an end": ("a.txt", _repeat("", "a@a.", " ")),
    "digits and dots": ("a.txt", _repeat("", "1.1.", "x")),
    "mojibake": ("a.txt", _repeat("", "Ã©â€™", "x")),
    "combining characters": ("a.txt", _repeat("a", "\u0301", "b")),
    "entities": ("a.html", _repeat("<html><body><p>", "&amp;#38;")),
    "lines of one character": ("a.jsonl", _repeat("", "{\n", "")),
}
