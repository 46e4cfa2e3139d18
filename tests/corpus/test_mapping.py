from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.gids import make_gid
from zero2all.base.errors import UsageError
from zero2all.corpus.document import Document
from zero2all.corpus.ingest import FileStats, to_record_batch
from zero2all.corpus.mapping import (
    AUTOMATIC,
    DOCUMENT_FIELDS,
    MAPPING_PRESETS,
    FieldMapping,
    find_preset,
    resolve_mapping,
)
from zero2all.corpus.readers import RawFile, TextRecord, read_records
from zero2all.recipe import SourceRecipe


def source(**options: Any) -> SourceRecipe:
    return SourceRecipe(name="s", paths=["x"], **options)


def map_one(mapping: FieldMapping, record: dict[str, Any], category: str = "") -> Document | None:
    batch = to_record_batch([record], mapping, source(category=category), "place", 0, FileStats())
    return Document(**batch.to_pylist()[0]) if len(batch) else None


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
    assert document is not None
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
    assert document is not None
    assert (document.title, document.id, document.category) == ("T", "7", "c")
    assert document.content == "问：Q\n3 of en"  # a line with nothing in it is dropped
    assert json.loads(document.others) == {"meta": {"deep": {}}, "a.b": "dotted"}
    dotted = map_one(AUTOMATIC.with_rules({"content": "a.b"}), record)
    assert dotted is not None
    assert dotted.content == "dotted"


def test_a_template_cannot_reach_into_objects() -> None:
    with pytest.raises(UsageError, match="not a template"):
        resolve_mapping(source(fields={"content": "{text.__class__!r}"}))
    assert map_one(AUTOMATIC.with_rules({"content": "{text.__class__}"}), {"text": "x"}) is None


def test_fields_go_over_a_ready_mapping_and_mistakes_are_named() -> None:
    mapping = resolve_mapping(source(mapping="alpaca", fields={"title": "output"}))
    document = map_one(mapping, {"instruction": "I", "output": "O"})
    assert document is not None
    assert (document.title, document.content) == ("O", "I\nO")
    with pytest.raises(UsageError, match="no mapping 'alpacca'; there are automatic, baike2018qa"):
        resolve_mapping(source(mapping="alpacca"))


def test_a_file_that_is_one_text_is_not_mapped() -> None:
    record = TextRecord(id="a.txt", title="a.txt", content="text")
    document = map_one(resolve_mapping(source(mapping="alpaca")), record)
    assert document is not None
    assert document.content == "text"


def test_what_holds_no_text_gives_no_document() -> None:
    for record in (
        {},
        {"text": "  "},
        {"text": 5},
        {"text": None},
        {"paragraphs": []},
        {"paragraphs": [1]},
        {"x": "y"},
    ):
        assert map_one(AUTOMATIC, record) is None


def test_the_gid_is_of_source_own_id_and_content() -> None:
    document = map_one(AUTOMATIC, {"id": 5, "text": "x", "more": 1})
    assert document is not None
    assert document.gid == make_gid("s", "5", "x")
    unnamed = map_one(AUTOMATIC, {"text": "x"})
    assert unnamed is not None
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
    assert plain is not None
    assert plain.content == record["body"]
    for rule, expected in (("body|html", "one & two"), ("{title}: {body|html}", "T: one & two")):
        document = map_one(resolve_mapping(source(fields={"content": rule})), record)
        assert document is not None
        assert document.content == expected
        assert json.loads(document.others) == {"n": 1}


def test_others_are_what_json_says_of_the_rest() -> None:
    record = {"text": "x", "z": 'a"\n\u4e2d', "b": [1, {"d": 2, "c": None}], "e": "", "n": None, "f": 1.5, "t": True}
    document = map_one(AUTOMATIC, record)
    assert document is not None
    rest = {key: record[key] for key in ("z", "b", "f", "t")}
    assert document.others == json.dumps(rest, ensure_ascii=False, sort_keys=True)
