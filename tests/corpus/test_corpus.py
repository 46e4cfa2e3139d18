from __future__ import annotations

import gzip
import json
import os
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.corpus.builds import Row, corpus_of, rows_of, source_of, write_lines, write_texts
from tests.corpus.document_files import make_tar, zip_of
from zero2all.base.errors import Z2aError
from zero2all.cli.corpus import app
from zero2all.corpus import SCHEMA, BuiltCorpus, build_corpus, recommended_workers, summary_lines
from zero2all.corpus.corpus_report import corpus_report, flows, report_html
from zero2all.corpus.filters.quality_classifier import train_quality_model


def build(raw: Path, out: Path, source: dict[str, Any] | None = None, **options: Any) -> tuple[BuiltCorpus, list[Row]]:
    manifest = build_corpus(corpus_of(source_of(raw, **(source or {})), **options), out)
    return manifest, rows_of(out)


def contents(rows: list[Row]) -> list[str]:
    return sorted(row["content"] for row in rows)


def test_every_readable_format_gives_its_documents(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    (raw / "deep").mkdir(parents=True)
    (raw / "a.jsonl").write_text('{"text": "one"}\n\n{"content": "two", "title": "T", "x": 5}\n', encoding="utf-8")
    (raw / "b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "three"}\n'))
    with pa.CompressedOutputStream(str(raw / "c.jsonl.zst"), "zstd") as stream:
        stream.write('{"markdown": "四"}\n'.encode())
    (raw / "d.txt").write_bytes(b"\xef\xbb\xbffive\r\n")
    (raw / "deep" / "e.py").write_text("def six():\n\treturn 6\n")
    pq.write_table(pa.table({"id": [7], "text": ["seven"]}), raw / "f.parquet")
    (raw / "g.json").write_text('[{"answer": "eight"}, {"answer": "nine"}]')
    (raw / "h.json").write_text('{\n  "content": "ten"\n}')
    (raw / "i.json").write_text('{"text": "eleven"}\n{"text": "twelve"}\n')
    manifest, rows = build(raw, tmp_path / "out")
    expected = ["one", "two", "three", "四", "five\r\n", "def six():\n\treturn 6\n", "seven", "eight", "nine"]
    expected += ["ten", "eleven", "twelve"]
    assert contents(rows) == sorted(expected)
    two = next(row for row in rows if row["content"] == "two")
    assert (two["title"], two["data_src"], json.loads(two["others"])) == ("T", "s", {"x": 5})
    assert next(row for row in rows if row["content"] == "seven")["id"] == "7"
    assert manifest.documents == 12
    assert pq.read_schema(next((tmp_path / "out").glob("train/*.parquet"))).equals(SCHEMA)


def test_what_is_skipped_is_counted_with_its_reason(tmp_path: Path, raw: Path) -> None:
    (raw / "a.jsonl").write_bytes(b'{"text": "better"}\n{"text": \n[1]\n{"other": 5}\n{"text": "  "}\n\xff\xfe\n')
    (raw / "same.jsonl").write_text('{"id": 1, "text": "good"}\n{"id": 1, "text": "good"}\n')
    (raw / "b.tar.gz").write_bytes(b"")
    (raw / "c.txt").write_bytes(b"caf\xe9\0")
    (raw / "d.json").write_text('{"text": ')
    (raw / "e.parquet").write_bytes(b"PAR1")
    (raw / "f.jsonl.gz").write_bytes(b"not gzip")
    manifest, rows = build(raw, tmp_path / "out")
    assert len(rows) == 2
    left_out = manifest.left_out["s"]
    assert left_out.documents == {"broken JSON": 2, "not an object": 1, "no text in it": 2}
    assert manifest.sources["s"].quarantine[0].endswith("broken JSON")
    assert manifest.sources["s"].dropped["exact copy"].documents == 1
    files = {name for part in left_out.files.values() for name in part.first}
    assert files == {"b.tar.gz", "c.txt", "d.json", "e.parquet", "f.jsonl.gz"}
    assert {"empty file", "binary, not text", "broken JSON", "not gzip, though named so"} <= set(left_out.files)
    assert {reason: files.first for reason, files in left_out.record_files.items()} == {
        reason: ["a.jsonl"] for reason in left_out.documents
    }
    assert manifest.sources["s"].quarantine[0] == "a.jsonl line 2: broken JSON"


def test_skipped_files_are_named_in_the_summary_and_in_the_report(tmp_path: Path, raw: Path) -> None:
    (raw / "a.jsonl").write_text('{"text": "good"}\n{"text": \n')
    for number in range(4):
        (raw / f"<{number}>.mobi").write_bytes(b"BOOKMOBI\x00\xff")
    (raw / "empty.txt").touch()
    manifest, _ = build(raw, tmp_path / "out")
    assert summary_lines(manifest) == [
        "s: 1 document, 4B; validation 0, 0B",
        "  skipped: 4 files (format .mobi: <0>.mobi, <1>.mobi, <2>.mobi, ...), 1 record (broken JSON: a.jsonl), "
        "1 record (no text in it: empty.txt); convert files of such a format to text first",
    ]
    page = report_html(corpus_report(tmp_path / "out"))
    assert "&lt;3&gt;.mobi" in page
    assert "<td>broken JSON<td>1<td>a.jsonl</tr>" in page


def test_the_command_prints_for_each_source_what_was_kept_and_skipped(tmp_path: Path, raw: Path) -> None:
    (raw / "a.txt").write_text("some text")
    (raw / "b.mobi").write_bytes(b"BOOKMOBI\x00\xff")
    source = f"{{name: s, paths: [{tmp_path / 'raw'}]}}"
    (tmp_path / "my.yaml").write_text(f"out: {tmp_path}\ncorpus: {{filters: [], holdout: 0, sources: [{source}]}}\n")
    for unchanged in ("", " (unchanged)"):
        done = CliRunner().invoke(app, ["build", str(tmp_path / "my.yaml")])
        assert done.stdout.splitlines() == [
            "s: 1 document, 9B; validation 0, 0B",
            "  skipped: 1 file (format .mobi: b.mobi); convert files of such a format to text first",
            f"1 document, 9B in {tmp_path / 'documents'}{unchanged}",
        ]


def test_an_empty_corpus_names_what_was_skipped_and_dropped(tmp_path: Path, raw: Path) -> None:
    (raw / "paper.mobi").write_bytes(b"BOOKMOBI\x00\xff")
    (raw / "tiny.txt").write_text("tiny")
    with pytest.raises(Z2aError) as caught:
        build(raw, tmp_path / "out", filters=["too_short"])
    assert str(caught.value) == (
        "no document is left of 2 files; s: 1 file (format .mobi: paper.mobi), 1 document (too_short: too short); "
        "convert files of such a format to text first"
    )


def test_a_source_that_gives_nothing_is_a_warning_with_the_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.mobi").write_bytes(b"BOOKMOBI\x00\xff")
    build_corpus(corpus_of(source_of(tmp_path / "a.txt", "a"), source_of(tmp_path / "b.mobi", "b")), tmp_path / "out")
    assert "corpus source 'b' gave no documents (1 file (format .mobi: b.mobi); convert" in capsys.readouterr().err


def test_a_manifest_without_the_files_of_skipped_records_is_read(tmp_path: Path, raw: Path) -> None:
    (raw / "a.jsonl").write_text('{"text": "good"}\n{"text": \n')
    build(raw, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["left_out"]["s"]["record_files"]
    path.write_text(json.dumps(manifest))
    again, _ = build(raw, tmp_path / "out")
    assert again.reused
    assert summary_lines(again)[1] == "  skipped: 1 record (broken JSON)"


def test_growing_a_corpus_moves_no_document_across_the_split(tmp_path: Path, raw: Path) -> None:
    validation_ids = []
    for count in (200, 400):
        write_lines(raw / "a.jsonl", ({"id": n, "text": f"text {n}"} for n in range(count)))
        build(raw, tmp_path / "out", holdout=0.1)
        table = pq.read_table(tmp_path / "out" / "valid" / "s-00000.parquet")
        validation_ids.append({int(id) for id in table["id"].to_pylist()})
    assert {n for n in validation_ids[1] if n < 200} == validation_ids[0]
    assert 0.05 < len(validation_ids[1]) / 400 < 0.15


def test_shards_roll_over_and_keep_every_document(tmp_path: Path, raw: Path) -> None:
    write_texts(raw / "a.jsonl", (f"{n:05}" * 20 for n in range(100)))
    manifest, rows = build(raw, tmp_path / "out", shard_size="3KB")
    assert len(manifest.splits["train"]["s"].shards) == 4
    assert sorted(row["content"][:5] for row in rows) == [f"{n:05}" for n in range(100)]


def test_a_rerun_reads_only_what_changed_and_notices_damage(tmp_path: Path, raw: Path) -> None:
    (raw / "a.txt").write_text("one")
    assert not build(raw, tmp_path / "out")[0].reused
    assert build(raw, tmp_path / "out")[0].reused
    (raw / "b.txt").write_text("two")
    assert not build(raw, tmp_path / "out")[0].reused
    shard = tmp_path / "out" / "train" / "s-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    manifest, rows = build(raw, tmp_path / "out")
    assert not manifest.reused
    assert len(rows) == 2


def test_unusual_files_and_names_never_stop_a_build(tmp_path: Path) -> None:
    raw = tmp_path / "raw [old]"  # brackets that are no pattern
    (raw / "real").mkdir(parents=True)
    (raw / "real" / "a.txt").write_text("kept")
    (raw / "link").symlink_to(raw / "real", target_is_directory=True)  # the same directory twice is read once
    (raw / "real" / "loop").symlink_to(raw, target_is_directory=True)
    (raw / "dangling.txt").symlink_to(raw / "nowhere")
    (raw / "deep.jsonl").write_text("[" * 100_000 + "\n" + '{"text": "after", "more": "x\\ud83d"}')
    (raw / "pairs.jsonl").write_text('{"text": "a\\ud83db"}\n{"text": "\\ud83d\\ude00"}\n')
    (raw / "late.json").write_text('{"broken\n{"text": "line"}\n')
    times = pa.array([1_700_000_000_000_000_001], pa.timestamp("ns"))
    pq.write_table(pa.table({"text": ["timed"], "when": times}), raw / "t.parquet")
    binary = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": binary}), raw / "b.parquet")
    with open(os.fsencode(raw) + b"/\xb2\xe2.txt", "w") as stream:
        stream.write("named in GBK")
    manifest, rows = build(raw, tmp_path / "out")
    assert set(contents(rows)) == {"kept", "after", "line", "timed", "named in GBK", "a\ufffdb", "😀"}
    files = {name for part in manifest.left_out["s"].files.values() for name in part.first}
    assert files == {"dangling.txt"}
    assert sum(manifest.left_out["s"].documents.values()) == 3  # a line each, and the row that is not UTF-8


def test_excluded_and_hidden_files_are_not_read_and_fields_can_be_named(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for name in ("keep/a.py", "test/b.py", ".git/c.py", "__pycache__/d.py"):
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        (raw / name).write_text(name)
    (raw / "r.jsonl").write_text('{"text": "no", "story": "yes"}')
    source = {"exclude": ["test/*"], "fields": {"content": "story"}}
    _, rows = build(raw, tmp_path / "out", source=source)
    assert contents(rows) == ["keep/a.py", "yes"]


def test_names_match_in_any_unicode_form(tmp_path: Path, raw: Path) -> None:
    """macOS may list a name in another form than a recipe is written in."""
    for form in ("NFC", "NFD"):
        (raw / f"{unicodedata.normalize(form, 'né')}-{form}.txt").write_text(form)
    (raw / "kept.txt").write_text("kept")
    for form in ("NFC", "NFD"):
        _, rows = build(raw, tmp_path / form, {"exclude": [unicodedata.normalize(form, "né-*")]})
        assert contents(rows) == ["kept"]


def test_excluded_members_of_archives_are_not_read(tmp_path: Path, raw: Path) -> None:
    names = ("pkg/a.py", "test/b.py")
    (raw / "all.zip").write_bytes(zip_of({name: f"zip {name}".encode() for name in names}))
    (raw / "all.tar").write_bytes(make_tar({name: name.encode() for name in names}))
    _, rows = build(raw, tmp_path / "out", source={"exclude": ["test/*"]})
    assert contents(rows) == ["pkg/a.py", "zip pkg/a.py"]
    _, rows = build(raw, tmp_path / "out")  # other globs, other parts
    assert len(rows) == 4


def test_evaluation_text_goes_by_the_limits_of_the_recipe(tmp_path: Path, raw: Path) -> None:
    question = " ".join(f"word{n}" for n in range(40))
    book = " ".join(f"own{n}" for n in range(5000))
    quote = " ".join(question.split()[:13])
    texts = {"note": f"A note: {quote}", "book": f"{book} {quote} {book}", "leak": f"{book} {question}"}
    write_lines(raw / "a.jsonl", ({"id": name, "text": text} for name, text in texts.items()))
    exam = write_lines(tmp_path / "exam.jsonl", [{"question": question}])
    for limits, left in (({}, {"book"}), ({"min_hits": 1}, set()), ({"min_hits": 99, "min_share": 0.5}, set(texts))):
        manifest, rows = build(raw, tmp_path / "out", decontaminate=[str(exam)], contamination=limits)
        assert manifest.documents == len(left)
        assert {row["id"] for row in rows} == left


def test_evaluation_sets_of_the_same_name_all_count(tmp_path: Path, raw: Path) -> None:
    questions = {name: " ".join(f"{name}{n}" for n in range(40)) for name in ("gsm", "mmlu")}
    texts = {**questions, "own": "text of its own"}
    write_lines(raw / "a.jsonl", ({"id": name, "text": text} for name, text in texts.items()))
    for name, question in questions.items():
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "test.jsonl", [{"question": question}])
    _, left = build(raw, tmp_path / "out", decontaminate=[str(tmp_path / name / "test.jsonl") for name in questions])
    assert {row["id"] for row in left} == {"own"}


def test_files_that_look_the_same_are_two(tmp_path: Path) -> None:
    for name in ("en", "zh"):
        (tmp_path / "raw" / name).mkdir(parents=True)
        (tmp_path / "raw" / name / "part.txt").write_text(f"text of {name}")
        os.utime(tmp_path / "raw" / name / "part.txt", (1, 1))
    _, rows = build(tmp_path / "raw" / "*" / "part.txt", tmp_path / "out")
    assert contents(rows) == ["text of en", "text of zh"]


def test_near_duplicates_of_a_text_that_occurs_twice_are_found(tmp_path: Path, raw: Path) -> None:
    text = " ".join(f"word{n * n % 977}" for n in range(400))
    write_texts(raw / "a.jsonl", (text, text, text + " tail"))
    _, rows = build(raw, tmp_path / "out", dedup={"near": True})
    assert len(rows) == 1


def test_a_retrained_quality_model_is_noticed(tmp_path: Path, raw: Path) -> None:
    good = [f"The river had been rising since noon, and field {n} was gone by evening." for n in range(40)]
    bad = [f"BUY NOW !!! cheap pills at www.spam{n}.cn CLICK HERE" for n in range(40)]
    write_texts(raw / "a.jsonl", (good[0], bad[0]))
    filters = [{"name": "quality_score", "model": str(tmp_path / "model")}]
    for sides, left in (((good, bad), good[0]), ((bad, good), bad[0])):
        train_quality_model(*sides, tmp_path / "model")
        manifest, rows = build(raw, tmp_path / "out", filters=filters)
        assert not manifest.reused
        assert contents(rows) == [left]


def test_a_source_of_which_everything_is_excluded_is_an_error_a_person_can_act_on(tmp_path: Path, raw: Path) -> None:
    (raw / "a.txt").write_text("some text")
    with pytest.raises(Z2aError, match="no document is left of 0 files"):
        build(raw, tmp_path / "out", source={"exclude": ["*"]})


def test_a_small_build_is_not_worth_a_second_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.corpus.build.available_cores", lambda: 7)
    (tmp_path / "a.txt").write_text("x" * 1000)
    small = corpus_of(source_of(tmp_path))
    assert recommended_workers(small) == 1
    monkeypatch.setattr("zero2all.corpus.build.MIN_PARALLEL_BYTES", 1000)
    assert recommended_workers(small) == 7
    assert recommended_workers(corpus_of(source_of("s3://bucket/text"))) == 7


# --- the report

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)> some text that goes on for a while, as texts do. '
QUESTION = "Natalia sold clips to forty eight of her friends in April and then she sold half as many clips in May"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    prose = "The road went on and on through the hills, and nobody knew where it came from. " * 5
    rows = [{"text": f"{number} {prose} {number * 7}", "url": "https://example.org/a"} for number in range(30)]
    rows += [rows[0], {"text": f"{prose} {QUESTION}"}, {"text": "short"}]
    rows.insert(0, {"text": EVIL * 5, "title": "<b>bold</b>"})
    exam = write_lines(root / "eval.jsonl", [{"question": QUESTION, "answer": "72"}])
    filters = ["normalize", {"name": "too_short", "min_chars": 20}]
    source = source_of(write_lines(root / "a.jsonl", rows), "web")
    build_corpus(corpus_of(source, filters=filters, decontaminate=[str(exam)]), root / "documents")
    return root / "documents"


def test_every_byte_that_was_read_goes_somewhere(documents: Path) -> None:
    report = corpus_report(documents)
    account = report.sources["web"]
    assert account.read.documents == 34
    reasons = {reason: part.documents for reason, part in account.dropped.items()}
    assert reasons == {"too_short: too short": 1, "exact copy": 1, "evaluation text: eval.jsonl": 1}
    assert report.documents == 31
    assert sum(size for _, _, size in flows(report)) == account.read.bytes
    assert report.statistics["web"].domains == {"example.org": report.splits["train"]["web"].documents - 1}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "src"]


def test_the_page_shows_documents_as_text_and_loads_nothing(documents: Path) -> None:
    page = report_html(corpus_report(documents))
    seen = Tags()
    seen.feed(page)
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;bold" in page
    assert not seen.tags & {"script", "img", "iframe", "link"}
    assert seen.handlers == []
    assert "exact copy" in page


def test_an_evaluation_set_that_changes_is_looked_at_again(documents: Path) -> None:
    """The same recipe over another evaluation set must not reuse the documents."""
    root = documents.parent
    recipe = corpus_of(source_of(root / "a.jsonl"), decontaminate=[str(root / "other.jsonl")])
    for question, is_found in (("nothing that anybody wrote " * 5, False), (QUESTION, True)):
        write_lines(root / "other.jsonl", [{"question": question}])
        found = str(build_corpus(recipe, root / "again").sources)
        assert ("evaluation text: other.jsonl" in found, "evaluation text" in found) == (is_found, is_found)
