"""PDF, DOCX, EPUB, 7z and RAR files: what is read, and that hostile ones cost neither time, memory nor the build."""

from __future__ import annotations

import gzip
import importlib.util
import io
import multiprocessing
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.corpus import document_files as make
from tests.corpus.builds import build_source, texts_of, write_lines
from zero2all.base import limited_process
from zero2all.base.plugins import builtin_names
from zero2all.corpus import BuiltCorpus, summary_lines
from zero2all.corpus.ingest import FileStats, read_documents
from zero2all.corpus.readers import (
    BrokenRecord,
    RawFile,
    ReadLimits,
    SkippedMember,
    TextRecord,
    UnreadableFileError,
    archives,
    documents,
    list_files,
    read_record_chunks,
    read_records,
    reader_child,
    reader_process,
    records,
    web_pages,
)
from zero2all.corpus.readers.documents import TextOf, join_pages, parse_xml
from zero2all.corpus.readers.formats import ARCHIVES
from zero2all.corpus.readers.plain_text import sensible_title
from zero2all.corpus.readers.web_pages import close_empty_elements, html_to_text
from zero2all.corpus.sniff import sniff
from zero2all.recipe import SourceRecipe
from zero2all.tokenizer import template_child

pytest.importorskip("pypdf")
try:
    reader_process.require_libarchive()
    HAS_LIBARCHIVE = True
except UnreadableFileError:
    HAS_LIBARCHIVE = False
needs_libarchive = pytest.mark.skipif(not HAS_LIBARCHIVE, reason="no system library libarchive")
STRICT = ReadLimits(
    ratio_check_bytes=3 << 20, record_bytes=8 << 20, package_bytes=16 << 20, reader_seconds=1, reader_memory=512 << 20
)


def read(path: Path, limits: ReadLimits | None = None) -> list[dict[str, Any] | BrokenRecord]:
    return list(read_records(RawFile.from_path(path), limits))


def read_data(tmp_path: Path, name: str, data: bytes, limits: ReadLimits | None = None) -> list[Any]:
    (tmp_path / name).write_bytes(data)
    return read(tmp_path / name, limits)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(limited_process.subprocess, "Popen", Noted)
    return started


def outcomes(path: Path, limits: ReadLimits) -> list[str]:
    """Contents, reasons of broken records, and the reason the rest was not read for."""
    found = []
    try:
        for record in read_records(RawFile.from_path(path), limits):
            found.append(record.reason if isinstance(record, BrokenRecord) else str(record.get("content")))
    except UnreadableFileError as reason:
        found.append(str(reason))
    return found


# --- PDF


def test_a_pdf_is_one_document_of_all_its_pages(tmp_path: Path) -> None:
    words = ["north", "south", "east", "west", "moon"]
    pages = [
        ["Winds and tides", f"{number}", f"The {word} is exam-", f"ined by the {word}.", "A journal"]
        for number, word in enumerate(words)
    ]
    (record,) = read_data(tmp_path, "a.pdf", make.make_pdf(pages, title="On the tides"))
    assert isinstance(record, TextRecord)
    assert record["content"] == "\n".join(f"The {word} is examined by the {word}." for word in words)
    assert (record["id"], record["title"], record["pages"]) == ("a.pdf", "On the tides", 5)
    (unnamed,) = read_data(tmp_path, "b.pdf", b"junk of a server\n" + make.make_pdf([["text"]], "thesis.doc"))
    assert (unnamed["title"], unnamed["content"]) == ("b.pdf", "text")


def test_lines_are_removed_from_the_edge_of_pages_only_if_many_pages_have_them() -> None:
    assert join_pages(["Head\nfirst", "Head\nsecond"]) == "Head\nfirst\nHead\nsecond"
    assert join_pages(["a\nend", "b\nend", "c\nend", "d\nother"]) == "a\nb\nc\nd\nother"
    assert (
        join_pages(["Title 1\nChapter\none", "Title 2\nChapter\ntwo", "Title 3\nChapter\nthree"]) == "one\ntwo\nthree"
    )
    assert join_pages(["", "", ""]) == "\n\n"
    assert join_pages(["a self-\nmade X-\nray, well-\n1"]) == "a selfmade X-\nray, well-\n1"


@pytest.mark.parametrize(
    ("given", "sensible"),
    [
        ("On the\n Origin of Species", "On the Origin of Species"),
        ("红楼梦", "红楼梦"),
        ("Learning node.js", "Learning node.js"),
        *((bad, "") for bad in ("", " ", "Microsoft Word - thesis", "untitled-1", "thesis.DOCX", "2004-11", "___")),
    ],
)
def test_titles_that_programs_make_up_are_not_titles(given: str, sensible: str) -> None:
    assert sensible_title(given) == sensible


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
def test_an_encrypted_pdf_is_read_if_its_user_password_is_empty(tmp_path: Path, algorithm: str) -> None:
    pytest.importorskip("cryptography")
    plain = make.make_pdf([["a secret of everybody"]])
    (record,) = read_data(tmp_path, "open.pdf", make.encrypt_pdf(plain, "", algorithm))
    assert record["content"] == "a secret of everybody"
    with pytest.raises(UnreadableFileError, match=r"^encrypted$"):
        read_data(tmp_path, "closed.pdf", make.encrypt_pdf(plain, "password", algorithm))


def test_pdfs_without_text_and_with_broken_pages_are_counted(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"^no text layer$"):
        read_data(tmp_path, "scan.pdf", make.make_pdf([], contents=[make.stream(b"0 0 10 10 re f")]))
    broken = make.stream(b"not zlib at all", b"/Filter [/FlateDecode /NoSuchFilter]")
    contents = [make.stream(make.page_content([text])) for text in ("first", "third")]
    records = read_data(tmp_path, "half.pdf", make.make_pdf([], contents=[contents[0], broken, contents[1]]))
    assert [(one.reason, one.place) for one in records[:-1]] == [("broken page", "page 2")]
    assert (records[-1]["content"], records[-1]["pages"]) == ("first\nthird", 3)


def test_a_long_document_is_split_as_a_long_text_is(tmp_path: Path) -> None:
    lines = [[chr(97 + page) * (20 + number) for number in range(20)] for page in range(10)]
    records = read_data(tmp_path, "a.pdf", make.make_pdf(lines), ReadLimits(max_document_characters=1000))
    assert [record["id"] for record in records] == [f"a.pdf#{number}" for number in range(len(records))]
    assert len(records) > 3
    assert "".join(record["content"] for record in records) == "\n".join(line for page in lines for line in page)


# --- DOCX


def test_a_docx_is_the_text_of_its_body(tmp_path: Path) -> None:
    run = "<w:r><w:t xml:space='preserve'>{}</w:t></w:r>"
    body = "".join(
        [
            "<w:p><w:pPr><w:tabs><w:tab w:val='left'/></w:tabs></w:pPr>",
            run.format("One &amp; "), "<w:del><w:r><w:delText>deleted</w:delText></w:r></w:del>",
            run.format("the same"), "<w:r><w:tab/><w:t>after a tab</w:t><w:br/><w:t>next line</w:t></w:r></w:p>",
            "<w:p><w:moveFrom>" + run.format("moved away") + "</w:moveFrom><w:r><w:instrText>PAGE</w:instrText></w:r>",
            "<mc:AlternateContent><mc:Choice>" + run.format("shown") + "</mc:Choice><mc:Fallback>",
            run.format("shown again") + "</mc:Fallback></mc:AlternateContent></w:p>",
            "<w:tbl><w:tr>", *(f"<w:tc>{make.paragraph(text)}</w:tc>" for text in ("城市", "人口")), "</w:tr></w:tbl>",
            make.paragraph("尾"),
        ]
    )  # fmt: skip
    (record,) = read_data(tmp_path, "a.docx", make.make_docx(body, title="报告"))
    assert record["content"] == "One & the same\tafter a tab\nnext line\nshown\n城市 \t人口 \t\n尾\n"
    assert (record["id"], record["title"]) == ("a.docx", "报告")
    moved = make.make_docx(make.paragraph("elsewhere"), main="word/document2.xml")
    assert read_data(tmp_path, "b.docx", moved)[0]["content"] == "elsewhere\n"


# --- EPUB


def page(text: str, head: str = "<title/>") -> str:
    return f'<?xml version="1.0"?><html><head>{head}</head><body><p>{text}</p></body></html>'


def test_an_epub_is_its_chapters_in_reading_order(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse")
    chapters = {"z.xhtml": page("第一章 begins."), "text/a%20b.xhtml": page("The middle."), "m.xhtml": page("The end.")}
    extra = {"OEBPS/text/a b.xhtml": page("The middle.").encode(), "OEBPS/unlisted.xhtml": page("not in it").encode()}
    data = make.make_epub(chapters, title="A book", extra=extra)
    for name in ("book.epub", "book", "book.zip"):
        (record,) = read_data(tmp_path, name, data)
        assert record["content"] == "第一章 begins.\n\nThe middle.\n\nThe end."
        assert record["title"] == "A book"


def test_empty_elements_of_xhtml_do_not_swallow_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resiliparse")
    text = close_empty_elements(page("one<br/>two <a id='x'/>three <i/>four", "<title/><script src='x'/>"))
    assert html_to_text(text) == "one\ntwo three four"
    monkeypatch.setattr(web_pages, "PIECE_CHARACTERS", 7)
    rng = random.Random(3)
    for _ in range(500):
        xhtml = "".join(rng.choice(["<a/>", "<br/>", "<", ">", "/>", " x", "<b c='d'/>"]) for _ in range(12))
        whole = web_pages._EMPTY_ELEMENT.sub(web_pages._with_end_tag, xhtml)
        assert close_empty_elements(xhtml) == whole


def test_a_missing_chapter_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse")
    data = make.make_epub({"a.xhtml": page("there"), "../../etc/passwd": page("outside")})
    broken, record = read_data(tmp_path, "a.epub", data)
    assert (broken.reason, broken.place) == ("broken chapter", "../etc/passwd")
    assert record["content"] == "there"


# --- 7z and RAR

PNG = b"\x89PNG\r\n\x1a\n\0\0"
MEMBERS = {"a/one.txt": b"the first text", "二.jsonl": b'{"text": "the second"}\n', "picture.png": PNG}
PACK = {
    "a.7z": lambda: make.make_7z(list(MEMBERS.items())),
    "a.rar": lambda: make.make_rar(MEMBERS),
    "b.rar": lambda: make.make_rar5(MEMBERS),
}


@needs_libarchive
@pytest.mark.parametrize("name", PACK)
def test_members_of_7z_and_rar_are_read_like_files(tmp_path: Path, name: str) -> None:
    first, second, skipped = read_data(tmp_path, name, PACK[name]())
    assert (first["id"], first["content"]) == (f"{name}!a/one.txt", "the first text")
    assert second == {"text": "the second"}
    assert isinstance(skipped, SkippedMember)
    assert (skipped.place, skipped.reason) == (f"{name}!picture.png", "format .png")
    assert sniff(tmp_path / name).detected.format == name.rpartition(".")[2]  # type: ignore[union-attr]


@needs_libarchive
def test_nothing_leads_out_of_a_7z_or_rar(tmp_path: Path) -> None:
    outside = [("../up.txt", b"text"), ("/etc/absolute.txt", b"text"), ("C:\\x.txt", b"text"), ("fine.txt", b"fine")]
    found = read_data(tmp_path, "a.7z", make.make_7z(outside, links={"link.txt": "/etc/passwd"}))
    assert [one["content"] for one in found if not isinstance(one, BrokenRecord)] == ["fine"]
    reasons = {one.place.partition("!")[2]: one.reason for one in found if isinstance(one, BrokenRecord)}
    assert reasons.pop("link.txt") == "link or device"
    assert set(reasons.values()) == {"path that leaves the archive"}
    assert len(reasons) == 3
    (link,) = read_data(tmp_path, "a.rar", make.make_rar({"link.txt": b"/etc/passwd"}, attributes=0o120777))
    assert link.reason == "link or device"
    (link,) = read_data(tmp_path, "b.rar", make.make_rar({"../up.txt": b"text"}))
    assert link.reason == "path that leaves the archive"


@needs_libarchive
def test_an_archive_that_is_read_in_part_leaves_no_process(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    (tmp_path / "a.7z").write_bytes(make.make_7z([(f"{n}.txt", b"text " * 50) for n in range(50)]))
    chunks = read_record_chunks(RawFile.from_path(tmp_path / "a.7z"))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert [process.returncode for process in children] == [-signal.SIGKILL]


@needs_libarchive
def test_documents_inside_archives_are_read_and_archives_are_not(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse")
    inner = {
        "a.pdf": make.make_pdf([["from a pdf"]]),
        "b.docx": make.make_docx(make.paragraph("from a docx")),
        "c.epub": make.make_epub({"a.xhtml": page("from an epub")}),
        "d.7z": make.make_7z([("a.txt", b"text")]),
    }
    for name, data in {"x.zip": make.zip_of(inner), "x.7z": make.make_7z(list(inner.items()))}.items():
        *records, skipped = read_data(tmp_path, name, data)
        assert [one["content"].strip() for one in records] == ["from a pdf", "from a docx", "from an epub"]
        assert skipped.reason == "archive inside an archive"
    (packed,) = read_data(tmp_path, "a.pdf.gz", gzip.compress(inner["a.pdf"]))
    assert packed["content"] == "from a pdf"
    with pytest.raises(UnreadableFileError, match="7z inside another compression"):
        read_data(tmp_path, "d.7z.gz", gzip.compress(inner["d.7z"]))


# --- what is missing


@pytest.mark.parametrize("name", ["a.pdf", "a.epub", "a.7z", "a.rar"])
def test_without_the_extra_the_file_and_the_remedy_are_named(
    tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files = {"a.pdf": make.make_pdf([["text"]]), "a.epub": make.make_epub({"a": page("x")}), "a.rar": make.make_rar({})}
    (raw / name).write_bytes(files.get(name, b"7z\xbc\xaf\x27\x1c" + bytes(26)))
    (raw / "b.txt").write_text("text that stays in the corpus")
    (raw / "rows.jsonl").write_text("{}\n{\n[]\n" * 3 + '{"text": "' + "[" * 9 + '"}\n')
    (raw / "a.bin").write_bytes(bytes(9))
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setitem(sys.modules, "resiliparse.extract.html2text", None)
    built = build_source(raw, tmp_path / "documents")
    first = f"  skipped: 1 file (needs pip install 'zero2all[corpus]': {name}), 3 records ("
    assert summary_lines(built)[1].startswith(first)  # before reasons that are more frequent


def test_without_the_system_library_the_remedy_is_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libarchive", None)
    monkeypatch.delitem(sys.modules, "libarchive")
    (tmp_path / "libarchive.py").write_text("import ctypes\nctypes.CDLL(None).archive_version_number\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnreadableFileError, match="libarchive13"):
        read_data(tmp_path, "a.rar", make.make_rar({"a.txt": b"text"}))


# --- hostile files

REASONS = {  # and the files that are left out, or parts of which are left out, for it
    "encrypted": "encrypted.pdf encrypted.epub encrypted.7z encrypted.rar",
    "encrypted, or an old Word file": "encrypted.docx",
    "XML with declarations in it": "entities.docx outside-entity.docx defaults.docx entities.epub",
    "XML with too large or too many tags": "attributes.docx names.docx",
    "broken XML": "not-xml.docx",
    "nested too deep": "nested.docx",
    "unpacks to more than 250 times its size": "bomb.docx bomb.7z many-bombs.7z claims.rar",
    "binary, not text": "many-bombs.7z",
    "broken archive": "truncated.docx truncated.epub",
    "broken file (ArchiveError)": "truncated.7z broken.7z truncated.rar broken.rar broken5.rar",
    "part missing": "no-body.docx no-container.epub",
    "more than 50000 chapters": "many-chapters.epub",
    "no readable chapter": "empty-elements.epub outside.epub bomb.epub",
    "broken chapter": "outside.epub bomb.epub",
    "path that leaves the archive": "traps.7z traps.rar",
    "archive inside an archive": "traps.7z traps.rar",
    "link or device": "traps.7z",
}
EXPECTED: dict[str, set[str]] = {
    name: {reason for reason, files in REASONS.items() if name in files.split()}
    for name in " ".join(REASONS.values()).split()
}
# Of files that end by a limit on time or memory, or whose reason is the parser's.
OTHER_REASONS = (
    *("broken", "text larger", "no text layer", "no readable chapter"),
    *("takes more than", "needs more than", "crashed"),
)
T = TypeVar("T")
PEAK_MIB = 700  # of this process and of the child, which may have 512


def measure_children(function: Callable[..., T], *args: object) -> tuple[T, int]:
    """The result, and the peak memory in MiB of the children: in a new process, which has none of earlier tests."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measured, function, *args).result()


def _measured(function: Callable[..., T], *args: object) -> tuple[T, int]:
    return function(*args), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10


def build_with_strict_limits(raw: Path, documents: Path) -> BuiltCorpus:
    limits = replace(STRICT, reader_seconds=3)  # to import a parser takes a second on a busy machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "ReadLimits", lambda: limits)
        return build_source(raw, documents)


@needs_libarchive
@pytest.mark.parametrize("all_hostile", [False, pytest.param(True, marks=pytest.mark.long)])  # these run into limits
def test_a_folder_of_every_format_is_built_and_every_hostile_file_is_named(
    tmp_path: Path, raw: Path, all_hostile: bool
) -> None:
    pytest.importorskip("resiliparse")
    good = make.every_format()
    assert set(good) == {*builtin_names("reader"), *ARCHIVES.values()}
    hostile = make.hostile_files(mib=16 if all_hostile else 4)
    del hostile["same-chapter.epub"]  # which is read
    hostile = {name: data for name, data in hostile.items() if all_hostile or name in EXPECTED}
    for name, data in {**dict(good.values()), **hostile}.items():
        (raw / name).write_bytes(data)
    built, peak = measure_children(build_with_strict_limits, raw, tmp_path / "documents")
    left_out = built.left_out["s"]
    assert sorted(text.strip(" \n#") for text in texts_of(tmp_path / "documents")) == sorted(
        f"the text of {one}" for one in good
    )
    reasons: dict[str, set[str]] = {}
    for by_reason in (left_out.files, left_out.record_files):
        for reason, files in by_reason.items():
            for name in files.first:
                reasons.setdefault(name, set()).add(reason)
    assert set(reasons) == set(hostile)
    assert {name: found for name, found in reasons.items() if name in EXPECTED} == EXPECTED
    assert all(reason.startswith(OTHER_REASONS) for name in set(hostile) - set(EXPECTED) for reason in reasons[name])
    assert peak < PEAK_MIB


def test_a_document_that_repeats_one_chapter_is_read_once(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse")
    (record,) = read_data(tmp_path, "a.epub", make.hostile_epubs(mib=1)["same-chapter"])
    assert len(record["content"]) < 1000


def test_a_page_that_would_take_hours_is_one_broken_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nesting costs quadratic time, in a file as in a field of a record."""
    pytest.importorskip("resiliparse")
    with pytest.raises(UnreadableFileError, match="nested too deep"):
        read_data(tmp_path, "a.html", make.nested_page(300_000).encode())
    monkeypatch.setattr(web_pages, "MAX_SCANNED_TAGS", 0)  # as if it had more tags than are looked at
    monkeypatch.setattr(web_pages, "PAGE_SECONDS", 1)
    with pytest.raises(UnreadableFileError, match="takes more than 1 s"):
        read_data(tmp_path, "a.html", make.nested_page(300_000).encode())
    fine = "<html><body><p>fine</p></body></html>"
    responses = b"".join(make.make_warc(one) for one in (make.nested_page(300_000), fine))
    broken, record = read_data(tmp_path, "a.warc", responses)
    assert (broken.reason, record["content"]) == ("takes more than 1 s to read", "fine")
    rows = [{"body": make.nested_page(300_000)}, {"body": fine}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = SourceRecipe(name="s", paths=[str(path)], fields={"content": "body|html"})
    stats = FileStats()
    (batch,) = read_documents(list_files(source)[0], source, stats)
    assert batch["content"].to_pylist() == ["fine"]
    assert stats.skipped == {"takes more than 1 s to read": 1}


def test_a_page_that_would_take_gigabytes_is_read(tmp_path: Path) -> None:
    """Formatting that is not closed costs quadratic memory: 6 GB here."""
    pytest.importorskip("resiliparse")
    (tmp_path / "a.html").write_text(make.formatted_page(4000))
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "from zero2all.corpus.readers.web_pages import html_to_text\n"
        "print(html_to_text(open(sys.argv[1]).read()).count('text'))"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "a.html")]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == "4000\n"


def test_a_page_gives_the_same_text_in_either_process(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    pytest.importorskip("resiliparse")
    html = page(
        "".join(f"<h2>标题 {n}</h2><p>line <b>{n}</b> &amp; <i>more</i>" for n in range(50)), "<title>T</title>"
    )
    here = web_pages._extract_page(html, ReadLimits())
    assert not children
    monkeypatch.setattr(web_pages, "MAX_TAGS", 10)
    assert web_pages._extract_page(html, ReadLimits()) == here
    assert len(children) == 1
    monkeypatch.undo()
    monkeypatch.setattr(web_pages, "MAX_COPIES", 10)
    assert web_pages._extract_page(html, ReadLimits()) == here
    assert here["content"].count("line") == 50


def test_a_server_that_names_a_codec_of_python_costs_no_more_time() -> None:
    data = b"<p>text-" + b"a" * 300_000
    start = time.process_time()
    assert web_pages.decode_html(data, "Punycode") == data.decode()
    assert time.process_time() - start < 10


def test_a_zip_member_is_unpacked_in_pieces_whatever_its_compression(tmp_path: Path) -> None:
    """zipfile unpacks all that it reads at once, and the size that the directory claims does not limit it."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.txt", bytes(100 << 20))
    data = sink.getvalue().replace(struct.pack("<I", 100 << 20), struct.pack("<I", 1000))
    (tmp_path / "a.zip").write_bytes(data)
    tracemalloc.start()
    outcomes(tmp_path / "a.zip", ReadLimits())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80 << 20


def test_a_zip_directory_is_not_read_into_memory_at_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_ZIP_DIRECTORY_BYTES", 1 << 20)
    data = make.zip_of({f"{number}" + "x" * 60_000: b"text" for number in range(20)})
    with pytest.raises(UnreadableFileError, match="directory larger than 1 MiB"):
        read_data(tmp_path, "a.zip", data)


def test_xml_costs_time_in_proportion_to_its_size(tmp_path: Path) -> None:
    """The long name of a namespace does not come with every element, and a title does not grow by pieces."""
    document = f"<w:document xmlns:w='{'x' * 1_000_000}'><w:body>" + "<w:p/>" * 5000
    long_name = make.zip_of({"word/document.xml": document.encode()})
    start = time.process_time()
    with pytest.raises(UnreadableFileError, match="broken XML"):
        read_data(tmp_path, "a.docx", long_name)
    assert time.process_time() - start < 5
    title = TextOf("title", 20)
    parse_xml(b"<x><title>" + b"long " * 1_000_000 + b"</title></x>", title)
    assert len(title.found) < 2_000_000
    (record,) = read_data(tmp_path, "b.docx", make.make_docx(make.paragraph("text"), title="长 " * 2000))
    assert record["title"] == "长 " * 150


def test_a_pdf_of_more_pages_or_text_than_any_real_one_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_PAGES", 3)
    with pytest.raises(UnreadableFileError, match="more than 3 pages"):
        read_data(tmp_path, "a.pdf", make.make_pdf([["text"]] * 4))
    with pytest.raises(UnreadableFileError, match="text larger than 0 MiB"):
        read_data(tmp_path, "a.pdf", make.make_pdf([["text " * 60_000]]), ReadLimits(record_bytes=1000))


def test_a_zip_directory_is_counted_not_believed(tmp_path: Path) -> None:
    data = bytearray(make.zip_of({f"{number}.txt": b"text" for number in range(300)}))
    end = data.rfind(b"PK\x05\x06")
    data[end + 8 : end + 12] = b"\x01\x00\x01\x00"  # claims one member
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(UnreadableFileError, match="more than 200 members"):
        read(tmp_path / "a.zip", ReadLimits(members=200))
    assert len(read(tmp_path / "a.zip", ReadLimits(members=300))) == 300


PROGRAM = "import os, sys\ndef main(connection, *words):\n    connection.recv_bytes()\n    {action}\n"
Replace = Callable[[str], None]


@pytest.fixture
def replace_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replace:
    def replace_by(action: str) -> None:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(action=action))
        monkeypatch.setattr(reader_process, "PROGRAM", program)

    return replace_by


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("while True: pass", "takes more than 1 s to read"),
        ("os.abort()", "crashed its reader (SIGABRT)"),
        ("os.kill(os.getpid(), 9)", "crashed its reader (SIGKILL)"),
        ("sys.exit(3)", "crashed its reader (status 3)"),
        ("connection.send_bytes(b'V' + bytes(5 << 20)); connection.recv_bytes()", "crashed its reader"),
        ("with open(__file__, 'a') as file: file.write('x')", "crashed its reader (status 1)"),
    ],
)
def test_a_parser_that_hangs_or_crashes_takes_only_its_file_with_it(
    tmp_path: Path, replace_parser: Replace, children: list[subprocess.Popen[bytes]], action: str, reason: str
) -> None:
    replace_parser(action)
    start = time.monotonic()
    with pytest.raises(UnreadableFileError, match=re.escape(reason)):
        read_data(tmp_path, "a.pdf", make.make_pdf([["text"]]), ReadLimits(reader_seconds=1, record_bytes=1 << 20))
    assert time.monotonic() - start < 60
    assert [process.returncode is None for process in children] == [False]


def test_a_parser_that_neither_computes_nor_answers_is_ended(
    tmp_path: Path, replace_parser: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_parser("connection.recv_bytes()")
    monkeypatch.setattr(reader_process, "WALL_FACTOR", 0.5)
    with pytest.raises(UnreadableFileError, match="takes more than 1 s"):
        read_data(tmp_path, "a.pdf", make.make_pdf([["text"]]), ReadLimits(reader_seconds=1))


def test_a_parser_sees_no_credentials(tmp_path: Path, replace_parser: Replace, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_parser("connection.send_bytes(b'F' + repr(sorted(os.environ)).encode()); connection.recv_bytes()")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(UnreadableFileError) as caught:
        read_data(tmp_path, "a.pdf", make.make_pdf([["text"]]))
    assert "PATH" in str(caught.value)
    assert "AWS" not in str(caught.value)


@needs_libarchive
@pytest.mark.parametrize("name", ["a.docx", "a.epub", "a.7z", "a.rar", "b.rar", "a.pdf"])
def test_damaged_files_raise_nothing_but_reasons(tmp_path: Path, name: str) -> None:
    """Cut short, and with bytes changed, at places of a fixed seed."""
    pytest.importorskip("resiliparse")
    whole = {
        "a.pdf": make.make_pdf([["some text"], ["more"]]),
        "a.docx": make.make_docx(make.paragraph("some text")),
        "a.epub": make.make_epub({"a.xhtml": page("some text")}),
    }.get(name) or PACK[name]()
    rng = random.Random(name)
    for number in range(3 if name in ("a.pdf", "a.7z", "a.rar", "b.rar") else 60):  # a process for each of those
        data = bytearray(whole)
        if number % 3:
            for place in rng.sample(range(8, len(data)), 3):
                data[place] = rng.randrange(256)
        else:
            del data[rng.randrange(8, len(data)) :]
        (tmp_path / name).write_bytes(data)
        outcomes(tmp_path / name, STRICT)


def test_programs_for_untrusted_input_import_nothing_large() -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*sorted(sys.modules))"
    for program in (limited_process, reader_child, template_child):
        words = [sys.executable, "-P", "-c", code, program.__file__]
        loaded = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        assert not {"zero2all", "numpy", "pyarrow", "pypdf"} & set(loaded)
