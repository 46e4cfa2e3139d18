"""Builders of small files of every format, and of hostile ones of some, for tests and benchmarks."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_void_p
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# --- PDF


def pdf_of(objects: Sequence[bytes], trailer: bytes = b"/Root 1 0 R") -> bytes:
    """A PDF of numbered objects, the first of them the catalog."""
    data, places = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % place for place in places)
    return bytes(data + b"trailer\n<</Size %d %s>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, trailer, start))


def stream(data: bytes, dictionary: bytes = b"") -> bytes:
    return b"<<%s /Length %d>>\nstream\n" % (dictionary, len(data)) + data + b"\nendstream"


def deflated(data: bytes) -> bytes:
    return stream(zlib.compress(data), b"/Filter /FlateDecode")


def page_content(lines: Sequence[str]) -> bytes:
    shown = [line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)") for line in lines]
    return ("BT /F1 12 Tf 72 720 Td " + " ".join(f"({line}) Tj 0 -14 Td" for line in shown) + " ET").encode("latin-1")


def make_pdf(pages: Sequence[Sequence[str]], title: str = "", contents: Sequence[bytes] | None = None) -> bytes:
    """Pages of lines; or of content streams as they are given."""
    streams = [stream(page_content(lines)) for lines in pages] if contents is None else list(contents)
    kids = b" ".join(b"%d 0 R" % (5 + 2 * number) for number in range(len(streams)))
    objects = [
        b"<</Type /Catalog /Pages 2 0 R>>",
        b"<</Type /Pages /Kids [%s] /Count %d>>" % (kids, len(streams)),
        b"<</Type /Font /Subtype /Type1 /BaseFont /Helvetica>>",
        b"<</Title (%s)>>" % title.encode("latin-1"),
    ]
    for number, content in enumerate(streams):
        page = b"<</Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R /Resources " % (6 + 2 * number)
        objects += [page + b"<</Font <</F1 3 0 R>> /XObject <</X %d 0 R>>>>>>" % (6 + 2 * number), content]
    return pdf_of(objects, b"/Root 1 0 R /Info 4 0 R")


def make_long_pdf(characters: int) -> bytes:
    """A font whose one character stands for a hundred lines."""
    shown = ("中\n" * 100).encode("utf-16-be").hex().encode()
    font_map = (
        b"begincmap 1 begincodespacerange <00> <FF> endcodespacerange 1 beginbfchar <41> <%s> endbfchar endcmap" % shown
    )
    page = b"<</Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 5 0 R /Resources <</Font <</F1 3 0 R>>>>>>"
    objects = [
        b"<</Type /Catalog /Pages 2 0 R>>",
        b"<</Type /Pages /Kids [4 0 R] /Count 1>>",
        b"<</Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 6 0 R>>",
        page,
        deflated(b"BT /F1 12 Tf (" + b"A" * characters + b") Tj ET"),
        stream(font_map),
    ]
    return pdf_of(objects)


def encrypt_pdf(data: bytes, user: str, algorithm: str) -> bytes:
    import pypdf

    writer = pypdf.PdfWriter(clone_from=io.BytesIO(data))
    writer.encrypt(user_password=user, owner_password="owner", algorithm=algorithm)
    sink = io.BytesIO()
    writer.write(sink)
    return sink.getvalue()


def hostile_pdfs(mib: int) -> dict[str, bytes]:
    """Small files that would take minutes or gigabytes; bombs among them unpack to at least that many MiB."""
    shown = b"(text) Tj " * (mib * 2**20 // 10)
    nested = zlib.compress(zlib.compress(shown), 9)
    deep = b"[" * 200_000 + b"]" * 200_000
    loop = [
        b"<</Type /Catalog /Pages 2 0 R>>",
        b"<</Type /Pages /Kids [3 0 R 3 0 R] /Count 2>>",
        b"<</Type /Pages /Kids [2 0 R 2 0 R] /Count 2>>",
    ]
    wide: list[bytes] = [b"<</Type /Catalog /Pages 2 0 R>>"]  # 2^30 pages in 30 objects
    for number in range(2, 32):
        wide.append(b"<</Type /Pages /Kids [%d 0 R %d 0 R] /Count 1000000000>>" % (number + 1, number + 1))
    wide.append(b"<</Type /Page /MediaBox [0 0 9 9]>>")
    numbers = zlib.compress(b"1 0 " * (mib * 2**18))
    object_stream = stream(numbers, b"/Type /ObjStm /N 40000000 /First 80000000 /Filter /FlateDecode")
    return {
        "encrypted": encrypt_pdf(make_pdf([["text"]]), "password", "RC4-128"),
        "truncated": make_pdf([["text"] * 30])[:600],
        "long": make_long_pdf(mib * 3000),
        "content-bomb": make_pdf([], contents=[deflated(shown)]),
        "nested-filters": make_pdf([], contents=[stream(nested, b"/Filter [/FlateDecode /FlateDecode]")]),
        "form-of-itself": make_pdf([], contents=[stream(b"/X Do /X Do", b"/Type /XObject /Subtype /Form")]),
        "page-loop": pdf_of(loop),
        "page-tree": pdf_of(wide),
        "object-stream": pdf_of([b"<</Type /Catalog /Pages 9 0 R>>", object_stream]),
        "deep-array": pdf_of([b"<</Type /Catalog /Pages 2 0 R>>", b"<</Type /Pages /Kids %s /Count 1>>" % deep]),
        "huge-length": pdf_of([b"<</Type /Catalog /Pages 2 0 R /Length 99999999999999999999>>"]),
        "no-pages": b"%PDF-1.7\n" + b"1 0 obj\n" * 20_000,
    }


# --- zip packages


def zip_of(members: Mapping[str, bytes]) -> bytes:
    """All members are compressed, but for the one that says of an EPUB what it is."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            how = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name), data, how)
    return sink.getvalue()


WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
MARKUP = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'


def word_part(body: str, prolog: str = "") -> bytes:
    return f"<?xml version='1.0'?>{prolog}<w:document {WORD} {MARKUP}><w:body>{body}</w:body></w:document>".encode()


def make_docx(body: str, title: str = "", main: str = "word/document.xml", prolog: str = "") -> bytes:
    relation = f"<Relationship Type='http://x/officeDocument' Target='{main}'/>"
    return zip_of(
        {
            "[Content_Types].xml": b"<Types/>",
            "_rels/.rels": f"<Relationships>{relation}</Relationships>".encode(),
            "docProps/core.xml": f"<p xmlns:dc='http://dc'><dc:title>{title}</dc:title></p>".encode(),
            main: word_part(body, prolog),
        }
    )


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


BILLION_LAUGHS = (
    "<!DOCTYPE x [<!ENTITY a0 'ha'>" + "".join(f"<!ENTITY a{n} '{f'&a{n - 1};' * 10}'>" for n in range(1, 10)) + "]>"
)
DEFAULTS = "<!DOCTYPE x [<!ATTLIST w:p " + " ".join(f"a{number} CDATA 'x'" for number in range(20_000)) + ">]>"
OUTSIDE_ENTITY = "<!DOCTYPE x [<!ENTITY out SYSTEM 'file:///etc/passwd'>]>"


def hostile_docx(mib: int) -> dict[str, bytes]:
    return {
        "entities": make_docx(paragraph("&a9;"), prolog=BILLION_LAUGHS),
        "outside-entity": make_docx(paragraph("&out;"), prolog=OUTSIDE_ENTITY),
        "defaults": make_docx("<w:p/>" * (mib << 15), prolog=DEFAULTS),
        "nested": make_docx("<w:tbl>" * 300_000),
        "attributes": make_docx("<w:p " + " ".join(f"a{number}=''" for number in range(600_000)) + "/>"),
        "names": make_docx("".join(f"<a{number}/>" for number in range(200_000))),
        "bomb": zip_of({"word/document.xml": b"<a>" + b" " * (mib << 20)}),
        "truncated": make_docx(paragraph("text"))[:-40],
        "no-body": zip_of({"[Content_Types].xml": b"<Types/>"}),
        "not-xml": zip_of({"word/document.xml": b"\xff\xfe\x00 nothing"}),
        "encrypted": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(1000),
    }


CONTAINER = b"<container><rootfiles><rootfile full-path='OEBPS/book.opf'/></rootfiles></container>"


def make_epub(
    chapters: Mapping[str, str], title: str = "", extra: Mapping[str, bytes] | None = None, spine: str = "", **item: str
) -> bytes:
    """Chapters by link, in the order of the spine."""
    items = "".join(
        f'<item id="c{number}" href="{link}" media-type="application/xhtml+xml"/>'
        for number, link in enumerate(chapters)
    )
    order = spine or "".join(f'<itemref idref="c{number}"/>' for number in range(len(chapters)))
    book = f"<metadata xmlns:dc='http://dc'><dc:title>{title}</dc:title></metadata><manifest>{items}</manifest>"
    members = {
        "mimetype": b"application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/book.opf": f"<package>{book}<spine>{order}</spine></package>".encode(),
        **{f"OEBPS/{link}": page.encode() for link, page in chapters.items()},
    }
    return zip_of(members | (extra or {}))


def nested_page(tags: int) -> str:
    """Every tag makes a parser look at all open elements."""
    return "<div>" * tags + "text"


def formatted_page(elements: int) -> str:
    """Every paragraph opens all these elements again."""
    return "<p>" + "".join(f"<b a={number}>" for number in range(elements)) + "</p><p>text" * elements


def hostile_epubs(mib: int) -> dict[str, bytes]:
    page = "<html><body><p>text</p></body></html>"
    many_items = b"<p>" + b"".join(b"<item id='%d' media-type='text/html'/>" % n for n in range(50_001)) + b"</p>"
    locked = b"<encryption><EncryptedData><CipherReference URI='OEBPS/a.xhtml'/></EncryptedData></encryption>"
    return {
        "encrypted": make_epub({"a.xhtml": page}, extra={"META-INF/encryption.xml": locked}),
        "entities": zip_of({"META-INF/container.xml": BILLION_LAUGHS.encode() + b"<x>&a9;</x>"}),
        "outside": make_epub({"../../../../etc/passwd": page}),
        "bomb": make_epub({"a.xhtml": "<p>" + " " * (mib << 20)}),
        "nested": make_epub({"a.xhtml": nested_page(min(mib << 14, 1_000_000))}),
        "formatted": make_epub({"a.xhtml": formatted_page(mib << 8)}),
        "empty-elements": make_epub({"a.xhtml": "<!--\U0001f600-->" + "<i/>" * min(mib << 15, 4_190_000)}),
        "many-chapters": make_epub({}, extra={"OEBPS/book.opf": many_items}),
        "same-chapter": make_epub({"a.xhtml": page * 100}, spine='<itemref idref="c0"/>' * 20_000),
        "no-container": zip_of({"a.xhtml": page.encode()}),
        "truncated": make_epub({"a.xhtml": page})[:-40],
    }


# --- 7z and RAR


def make_7z(members: Sequence[tuple[str, bytes]], links: Mapping[str, str] | None = None) -> bytes:
    import libarchive

    blocks: list[bytes] = []

    def write(block: bytes) -> int:
        blocks.append(bytes(block))
        return len(block)

    copy_symlink = libarchive.ffi.ffi("entry_copy_symlink", [c_void_p, c_char_p], None)
    with libarchive.custom_writer(write, "7zip") as archive:
        for name, data in members:
            archive.add_file_from_memory(name, len(data), data)
        for name, target in (links or {}).items():
            entry = libarchive.ArchiveEntry(pathname=name, size=0, filetype=0o120000)
            copy_symlink(entry._entry_p, target.encode())
            libarchive.ffi.write_header(archive._pointer, entry._entry_p)
            libarchive.ffi.write_finish_entry(archive._pointer)
    return b"".join(blocks)


def make_encrypted_7z() -> bytes:
    """An archive of one member that is encrypted with AES."""
    packed, name = bytes(16), "a.txt\0".encode("utf-16-le")
    coder = b"\x01" + b"\x24\x06\xf1\x07\x01" + b"\x02\x00\x00"  # one, with an id of four bytes and two of properties
    folder = b"\x07\x0b\x01\x00" + coder + b"\x0c\x10" + b"\x00"
    streams = b"\x04" + b"\x06\x00\x01\x09\x10\x00" + folder + b"\x08\x00" + b"\x00"
    files = b"\x05\x01" + b"\x11" + bytes([len(name) + 1, 0]) + name + b"\x00"
    header = b"\x01" + streams + files + b"\x00"
    start = struct.pack("<QQI", len(packed), len(header), zlib.crc32(header))
    return b"7z\xbc\xaf\x27\x1c\x00\x04" + struct.pack("<I", zlib.crc32(start)) + start + packed + header


def _rar_block(kind: int, flags: int, fields: bytes, data: bytes = b"") -> bytes:
    header = struct.pack("<BHH", kind, flags, 7 + len(fields)) + fields
    return struct.pack("<H", zlib.crc32(header) & 0xFFFF) + header + data


def make_rar(
    members: Mapping[str, bytes], flags: int = 0, claimed: int | None = None, attributes: int = 0o100644
) -> bytes:
    """A RAR 4 archive of stored members, of Unix; ``claimed`` is a size that is not true."""
    blocks = [b"Rar!\x1a\x07\x00", _rar_block(0x73, 0, bytes(6))]
    for name, data in members.items():
        size = len(data) if claimed is None else claimed
        fields = struct.pack(
            "<IIBIIBBHI", len(data), size, 3, zlib.crc32(data), 0x5A21_0000, 20, 0x30, len(name.encode()), attributes
        )
        blocks.append(_rar_block(0x74, 0x8000 | flags, fields + name.encode(), data))
    return b"".join([*blocks, _rar_block(0x7B, 0x4000, b"")])


def _number(value: int) -> bytes:
    """The variable-length number of RAR 5."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _rar5_block(header: bytes) -> bytes:
    sized = _number(len(header)) + header
    return struct.pack("<I", zlib.crc32(sized)) + sized


def make_rar5(members: Mapping[str, bytes]) -> bytes:
    """A RAR 5 archive of stored members."""
    blocks = [b"Rar!\x1a\x07\x01\x00", _rar5_block(_number(1) + _number(0) + _number(0))]
    for name, data in members.items():
        fields: list[Any] = [2, 2, len(data), 4, len(data), 0o100644]  # type, data follows, sizes, CRC is there
        header = b"".join(map(_number, fields)) + struct.pack("<I", zlib.crc32(data))
        header += _number(0) + _number(1) + _number(len(name.encode())) + name.encode()
        blocks += [_rar5_block(header), data]
    return b"".join([*blocks, _rar5_block(_number(5) + _number(0) + _number(0))])


def hostile_archives(mib: int) -> dict[str, bytes]:
    """By name of the file."""
    text = b"text " * 100
    traps = {"../up.txt": text, "/etc/passwd": text, "inner.zip": zip_of({"a.txt": text})}
    return {
        "traps.7z": make_7z(list(traps.items()), links={"link.txt": "/etc/passwd"}),
        "traps.rar": make_rar(traps),
        "encrypted.7z": make_encrypted_7z(),
        "bomb.7z": make_7z([("zeros.txt", bytes(mib << 20)), ("after.txt", text)]),
        "many-bombs.7z": make_7z([(f"{number}.txt", bytes(1 << 20)) for number in range(mib)]),
        "truncated.7z": make_7z([("a.txt", text)])[:-10],
        "broken.7z": make_7z([("a.txt", text)])[:32] + bytes(100),
        "encrypted.rar": make_rar({"a.txt": text}, flags=4),
        "truncated.rar": make_rar({"a.txt": text * 100})[:300],
        "claims.rar": make_rar({"a.txt": text}, claimed=2**31),
        "broken.rar": b"Rar!\x1a\x07\x00" + b"\xff" * 500,
        "broken5.rar": make_rar5({"a.txt": text})[:12] + b"\xff" * 500,
    }


# --- every format


def _make_parquet(text: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [text]}), sink)
    return sink.getvalue()


def make_tar(members: Mapping[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def make_warc(page: str) -> bytes:
    body = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n{page}".encode()
    header = "WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\n"
    return f"{header}Content-Length: {len(body)}\r\n\r\n".encode() + body + b"\r\n\r\n"


def every_format() -> dict[str, tuple[str, bytes]]:
    """By format the name of a file and the file; the text of each is ``the text of`` and the format."""
    page = "<html><body><p>the text of {}</p></body></html>"
    return {
        "jsonl": ("a.jsonl", b'{"text": "the text of jsonl"}\n'),
        "json array": ("array.json", json.dumps([{"text": "the text of json array"}]).encode()),
        "json object": ("object.json", json.dumps({"text": "the text of json object"}).encode()),
        "parquet": ("a.parquet", _make_parquet("the text of parquet")),
        "csv": ("a.csv", b"id,text\n1,the text of csv\n"),
        "text": ("a.txt", b"the text of text"),
        "markdown": ("a.md", b"the text of markdown"),
        "code": ("a.py", b"# the text of code"),
        "wikiextractor": ("wiki_00", b'<doc id="1" url="x" title="T">\nthe text of wikiextractor\n</doc>\n'),
        "html": ("a.html", page.format("html").encode()),
        "warc": ("a.warc", make_warc(page.format("warc"))),
        "zip": ("a.zip", zip_of({"a.txt": b"the text of zip"})),
        "tar": ("a.tar", make_tar({"a.txt": b"the text of tar"})),
        "7z": ("a.7z", make_7z([("a.txt", b"the text of 7z")])),
        "rar": ("a.rar", make_rar({"a.txt": b"the text of rar"})),
        "pdf": ("a.pdf", make_pdf([["the text of pdf"]])),
        "docx": ("a.docx", make_docx(paragraph("the text of docx"))),
        "epub": ("a.epub", make_epub({"a.xhtml": page.format("epub")})),
    }


def hostile_files(mib: int) -> dict[str, bytes]:
    """All of them by the name of the file."""
    files = {f"{name}.pdf": data for name, data in hostile_pdfs(mib).items()}
    files |= {f"{name}.docx": data for name, data in hostile_docx(mib).items()}
    files |= {f"{name}.epub": data for name, data in hostile_epubs(mib).items()}
    return files | hostile_archives(mib)
