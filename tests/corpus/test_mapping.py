from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.builds import build_source, make_gid, source_of
from zero2all.base.errors import UsageError
from zero2all.base.tasks import TaskEngine
from zero2all.corpus.document import Document
from zero2all.corpus.ingest import FileStats, read_documents, to_record_batch
from zero2all.corpus.mapping import (
    AUTOMATIC,
    DOCUMENT_FIELDS,
    MAPPING_PRESETS,
    FieldMapping,
    find_preset,
    resolve_mapping,
)
from zero2all.corpus.readers import RawFile, TextRecord, list_files, read_records, records, split_large_file
from zero2all.corpus.readers.encoding import fix_mojibake

source = partial(source_of, "x")


def map_one(mapping: FieldMapping, record: dict[str, Any], category: str = "") -> Document:
    (row,) = to_record_batch([record], mapping, source(category=category), "place", 0, FileStats()).to_pylist()
    return Document(**row)


# One record of each kind in the names its publisher uses, and what must come of it.
RECORDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "baike2018qa": (
        {"qid": "q1", "category": "健康", "title": "问？", "desc": "", "answer": "答。"},
        {"id": "q1", "category": "健康", "title": "问？", "content": "问？\n答。"},
    ),
    "new2016zh": (
        {"news_id": "7", "keywords": "新闻", "title": "题", "desc": "述", "time": "03-21", "content": "文"},
        {"id": "7", "category": "新闻", "title": "题", "desc": "述", "content": "文"},
    ),
    "webtext2019zh": (
        {"qid": 1, "title": "问", "desc": "述", "topic": "题材", "star": 3, "content": "答", "answer_id": 9,
         "answerer_tags": ""},
        {"id": "9", "category": "题材", "title": "问", "desc": "述", "content": "问\n述\n答"},
    ),
    "wikipedia": (
        {"id": "12", "url": "https://zh.wikipedia.org/wiki?curid=12", "title": "数学", "text": "数学是…"},
        {"id": "12", "title": "数学", "content": "数学是…"},
    ),
    "zhihu-kol": (
        {"INSTRUCTION": "怎么办？", "RESPONSE": "这样办。", "SOURCE": "Zhihu", "METADATA": "{}"},
        {"category": "Zhihu", "title": "怎么办？", "content": "怎么办？\n这样办。"},
    ),
    "wudao": (
        {"id": 5, "uniqueKey": "k5", "titleUkey": "t", "dataType": "百科", "title": "题", "content": "文"},
        {"id": "k5", "category": "百科", "title": "题", "content": "文"},
    ),
    "github-python": (
        {"repo_name": "a/b", "path": "c/d.py", "copies": "1", "size": "9", "content": "x = 1\n", "license": "mit"},
        {"id": "a/b/c/d.py", "title": "c/d.py", "content": "x = 1\n"},
    ),
    "c4": (
        {"text": "page", "timestamp": "2019-04-25T12:57:54Z", "url": "http://x/"},
        {"id": "http://x/", "content": "page"},
    ),
    "fineweb": (
        {"text": "page", "id": "<urn:uuid:1>", "dump": "CC-MAIN-2013-20", "url": "http://x/", "language": "en",
         "language_score": 0.9, "token_count": 1},
        {"id": "<urn:uuid:1>", "content": "page"},
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1+1", "output": "2"},
        {"title": "Add.", "content": "Add.\n1+1\n2"},
    ),
    "poetry": (
        {"author": "李白", "paragraphs": ["床前明月光，", "疑是地上霜。"], "rhythmic": "静夜思"},
        {"title": "静夜思", "content": "床前明月光，\n疑是地上霜。"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_ready_mappings_know_their_records(name: str) -> None:
    record, expected = RECORDS[name]
    assert find_preset(record) == name
    document = map_one(resolve_mapping(source(mapping=name)), record)
    assert {ours: getattr(document, ours) for ours in DOCUMENT_FIELDS if ours in expected} == expected
    others = json.loads(document.others) if document.others else {}
    used = " ".join(expected.values())
    for key, value in record.items():  # nothing that a record says is lost
        shown = "\n".join(value) if isinstance(value, list) else str(value)
        assert not shown or shown in used or others.get(key) == value, key


def test_every_ready_mapping_is_tried_above() -> None:
    assert set(MAPPING_PRESETS) == {*RECORDS, "automatic"}


def test_a_rule_is_a_name_a_path_or_a_template() -> None:
    record = {"meta": {"title": "T", "lang": "en", "deep": {"id": 7}}, "q": "Q", "a": "", "n": 3, "a.b": "dotted"}
    fields = {"title": "meta.title", "id": "meta.deep.id", "content": "问：{q}\n答：{a}\n{n} of {meta.lang}"}
    document = map_one(AUTOMATIC.with_rules(fields), record, "c")
    assert (document.title, document.id, document.category) == ("T", "7", "c")
    assert document.content == "问：Q\n3 of en"  # a line with nothing in it is dropped
    assert json.loads(document.others) == {"meta": {"deep": {}}, "a.b": "dotted"}
    dotted = map_one(AUTOMATIC.with_rules({"content": "a.b"}), record)
    assert dotted.content == "dotted"


def test_a_template_cannot_reach_into_objects() -> None:
    with pytest.raises(UsageError, match="not a template"):
        resolve_mapping(source(fields={"content": "{text.__class__!r}"}))
    assert has_no_text({"text": "x"}, AUTOMATIC.with_rules({"content": "{text.__class__}"}))


def test_fields_go_over_a_ready_mapping_and_mistakes_are_named() -> None:
    mapping = resolve_mapping(source(mapping="alpaca", fields={"title": "output"}))
    document = map_one(mapping, {"instruction": "I", "output": "O"})
    assert (document.title, document.content) == ("O", "I\nO")
    with pytest.raises(UsageError, match="no mapping 'alpacca'; there are automatic, baike2018qa"):
        resolve_mapping(source(mapping="alpacca"))


def test_a_file_that_is_one_text_is_not_mapped() -> None:
    record = TextRecord(id="a.txt", title="a.txt", content="text")
    document = map_one(resolve_mapping(source(mapping="alpaca")), record)
    assert document.content == "text"


def has_no_text(record: dict[str, Any], mapping: FieldMapping = AUTOMATIC) -> bool:
    return len(to_record_batch([record], mapping, source(), "place", 0, FileStats())) == 0


def test_what_holds_no_text_gives_no_document() -> None:
    fields = (("text", "  "), ("text", 5), ("text", None), ("paragraphs", []), ("paragraphs", [1]), ("x", "y"))
    assert all(map(has_no_text, ({}, *({name: value} for name, value in fields))))


def test_the_gid_is_of_source_own_id_and_content() -> None:
    document = map_one(AUTOMATIC, {"id": 5, "text": "x", "more": 1})
    assert document.gid == make_gid("s", "5", "x")
    unnamed = map_one(AUTOMATIC, {"text": "x"})
    assert (unnamed.id, unnamed.gid) == ("place0", make_gid("s", "", "x"))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("zh/baike2018qa_style/baike_qa_train.jsonl", "baike2018qa"),
        ("zh/news2016zh_style/news_zh_train.jsonl", "new2016zh"),
        ("zh/webtext2019zh_style/oi_wiki_train.jsonl", "webtext2019zh"),
        ("zh/wiki2019zh_style/wiki_zh_00.jsonl", "wikipedia"),
        ("zh/wikiextractor_raw/AA/wiki_60", "wikipedia"),
        ("zh/poetry/chinese_poetry.json", "poetry"),
        ("en/wiki_parquet/train-00000-of-00002.parquet", "wikipedia"),
        ("code/pypi_science_tools.jsonl.zst", "github-python"),
        ("sft/alpaca_en_5k.json", "alpaca"),
    ],
)
def test_ready_mappings_fit_files_of_their_shape(shared_corpus: Path, path: str, name: str) -> None:
    records = list(read_records(RawFile.from_path(shared_corpus / path)))
    assert find_preset(set.intersection(*(set(record) for record in records))) == name
    with_text = [record for record in records if record.get("text", "x").strip()]
    assert all(MAPPING_PRESETS[name].map_record(record) for record in with_text)


def test_html_in_a_field_becomes_text_where_the_mapping_says_so() -> None:
    pytest.importorskip("resiliparse")
    record = {"title": "T", "body": "<p>one &amp; <b>two</b></p><script>x = 1</script>", "n": 1}
    plain = map_one(AUTOMATIC, record)
    assert plain.content == record["body"]
    for rule, expected in (("body|html", "one & two"), ("{title}: {body|html}", "T: one & two")):
        document = map_one(resolve_mapping(source(fields={"content": rule})), record)
        assert document.content == expected
        assert json.loads(document.others) == {"n": 1}


def test_others_are_what_json_says_of_the_rest() -> None:
    record = {"text": "x", "z": 'a"\n\u4e2d', "b": [1, {"d": 2, "c": None}], "e": "", "n": None, "f": 1.5, "t": True}
    document = map_one(AUTOMATIC, record)
    rest = {key: record[key] for key in ("z", "b", "f", "t")}
    assert document.others == json.dumps(rest, ensure_ascii=False, sort_keys=True)


# --- batches of documents: the same ones as reading record by record gave, in ranges as in one read

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
    stats = FileStats()
    rows = [row for batch in read_documents(file, source_of("x", **options), stats) for row in batch.to_pylist()]
    return rows, stats


@pytest.mark.parametrize("name", DIGESTS)
def test_every_shape_gives_the_documents_it_gave_record_by_record(shared_corpus: Path, name: str) -> None:
    top, _, below = name.partition("/")
    (file,) = (file for file in list_files(source_of(shared_corpus / top)) if file.name == below)
    rows, _ = documents(file, name=top)
    assert hashlib.sha256("".join(map(repr, rows)).encode()).hexdigest()[:16] == DIGESTS[name]


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
    contents = {
        "array.json": json.dumps([{"text": f"text {number}"} for number in range(500)]).encode(),
        "gb.jsonl": ('{"text": "春眠不觉晓"}\n' * 500).encode("gb18030"),
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
    whole = build_source(raw, tmp_path / "whole")
    monkeypatch.setattr(records, "FILE_RANGE_BYTES", 20_000)
    built = [build_source(raw, tmp_path / str(workers), TaskEngine(workers=workers)) for workers in (1, 2)]
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
    (row,) = to_record_batch([{"text": text}], AUTOMATIC, source_of("x"), "a#", 0, FileStats()).to_pylist()
    assert row["content"] == stripped
    assert row["gid"] == make_gid("s", "", text)


def test_only_bad_lines_of_bad_texts_are_mended() -> None:
    pytest.importorskip("ftfy")
    bad = "naïve café".encode().decode("latin-1")
    texts = [f"Шостакович\n{bad}\nend", "fine", bad, f"😀\n{bad}"]
    assert [*map(fix_mojibake, texts)] == ["Шостакович\nnaïve café\nend", "fine", "naïve café", "😀\nnaïve café"]
