"""Sources of conversations: their shapes, what is malformed, and that messages survive every stage of a build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.test_validation_blocks import book
from zero2all.base.conversation import Conversation
from zero2all.base.errors import Z2aError
from zero2all.corpus import BuiltCorpus, build_corpus
from zero2all.corpus.corpus_export import export_documents
from zero2all.corpus.ingest import CHAT_IN_TEXT
from zero2all.corpus.sniff import sniff
from zero2all.corpus.validation_split import COPY
from zero2all.recipe import CorpusRecipe, SourceRecipe, parse_recipe

Row = dict[str, Any]
TURNS = [("user", "Who are you?"), ("assistant", "A model."), ("user", "Thanks."), ("assistant", "You are welcome.")]
TOOLS = [{"name": "search", "description": "Find it", "parameters": {"type": "object", "properties": {}}}]
CALL = {"name": "search", "arguments": {"q": "x", "a": 1}}


def openai(turns: list[tuple[str, str]]) -> Row:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def sharegpt(turns: list[tuple[str, str]]) -> Row:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {"conversations": [{"from": names[role], "value": text} for role, text in turns]}


def parts(turns: list[tuple[str, str]]) -> Row:
    return {"messages": [{"role": r, "content": [{"type": "text", "value": t}], "loss_weight": 0} for r, t in turns]}


def pairs(turns: list[tuple[str, str]]) -> Row:
    said = [text for _, text in turns]
    return {"conversation": [{"human": a, "assistant": b} for a, b in zip(said[::2], said[1::2], strict=True)]}


def alpaca(turns: list[tuple[str, str]]) -> Row:
    (_, first), (_, second), (_, question), (_, answer) = turns
    return {"instruction": question, "input": "", "output": answer, "history": [[first, second]]}


def moss(turns: list[tuple[str, str]]) -> Row:
    said = [text for _, text in turns]
    chat = {
        f"turn_{number}": {
            "Human": f"<|Human|>: {question}<eoh>\n", "Inner Thoughts": "<|Inner Thoughts|>: None<eot>\n",
            "Commands": "<|Commands|>: None<eoc>\n", "Tool Responses": "<|Results|>: None<eor>\n",
            "MOSS": f"<|MOSS|>: {answer}<eom>\n",
        }
        for number, (question, answer) in reversed(list(enumerate(zip(said[::2], said[1::2], strict=True), 9)))
    }  # fmt: skip
    return {"conversation_id": "7", "meta_instruction": "", "num_turns": 2, "chat": chat}


SHAPES = {shape.__name__: shape for shape in (openai, sharegpt, parts, pairs, alpaca, moss)}


def recipe_of(root: Path, options: Row | None = None, **source: Any) -> CorpusRecipe:
    given = {"name": "chat", "kind": "chat", "paths": [str(root / "chat.jsonl")], **source}
    return CorpusRecipe(**{"sources": [SourceRecipe(**given)], "holdout": 0.0, **(options or {})})


def build(root: Path, records: list[Any], options: Row | None = None, **source: Any) -> tuple[BuiltCorpus, list[Row]]:
    """Records as JSONL; the manifest, and the rows of both splits."""
    root.mkdir(exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (root / "chat.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return build_corpus(recipe_of(root, options, **source), root / "out"), rows(root / "out")


def rows(documents: Path) -> list[Row]:
    return [row for path in sorted(documents.glob("*/*.parquet")) for row in pq.read_table(path).to_pylist()]


def messages(row: Row) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in Conversation.from_json(json.loads(row["others"])).messages]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_messages(shape: str, tmp_path: Path) -> None:
    record = SHAPES[shape](TURNS) | {"id": "own", "language": "en"}
    built, (row,) = build(tmp_path / "lines", [record])
    assert messages(row) == TURNS
    assert (row["id"], row["data_src"]) == ("own", "chat")
    assert row["content"] == "Who are you?\n\nA model.\n\nThanks.\n\nYou are welcome."
    assert json.loads(row["others"])["language"] == "en"
    assert set(json.loads(row["others"])) <= {"messages", "language", "num_turns", "conversation_id"}
    assert built.splits["train"]["chat"].kind == "chat"


@pytest.mark.parametrize("shape", SHAPES)
def test_one_conversation_a_file_is_not_taken_for_a_list_of_records(shape: str, tmp_path: Path, raw: Path) -> None:
    (raw / "one.json").write_text(json.dumps(SHAPES[shape](TURNS) | {"tools": TOOLS * 9}, indent=1))
    _, (row,) = build(tmp_path, [], paths=[str(raw)])
    assert messages(row) == TURNS


def test_conversations_in_parquet_have_null_fields(tmp_path: Path) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    table = pa.Table.from_pylist([{"prompt_id": "p", "messages": [*openai(TURNS)["messages"], calls]}])
    pq.write_table(table, tmp_path / "chat.parquet")
    _, (row,) = build(tmp_path, [], paths=[str(tmp_path / "chat.parquet")])
    assert messages(row) == [*TURNS, ("assistant", "")]


def test_calls_of_tools_are_read_from_both_forms(tmp_path: Path) -> None:
    sharegpt_form = {
        "conversations": [
            {"from": "human", "value": "find x"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": '{"found": 1}'},
            {"from": "gpt", "value": "There is one."},
        ],
        "tools": json.dumps(TOOLS),
        "system": "Be short.",
    }
    openai_form = {
        "messages": [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": "find x"},
            {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": '{"q": "x", "a": 1}'}},
            {"role": "function", "name": "search", "content": '{"found": 1}'},
            {"role": "assistant", "content": "There is one."},
        ],
        "tools": TOOLS,
    }
    _, (one,) = build(tmp_path / "a", [sharegpt_form])
    _, (other,) = build(tmp_path / "b", [openai_form])
    chat = Conversation.from_json(json.loads(one["others"]))
    assert chat == Conversation.from_json(json.loads(other["others"]))
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert list(chat.messages[2].tool_calls[0].arguments) == ["q", "a"]
    assert list(chat.tools) == TOOLS
    assert "description" not in one["content"]


def test_a_field_of_another_name_may_hold_the_messages(tmp_path: Path) -> None:
    record = {"data": {"dialog": openai(TURNS)["messages"], "lang": "en", "tools": TOOLS}}
    others = [openai(TURNS), {"data": 5}, {"data": {"dialog": {}}}, {"data.dialog": openai(TURNS[:2])["messages"]}]
    built, (row, flat) = build(tmp_path, [record, *others], fields={"content": "data.dialog"})
    assert messages(flat) == TURNS[:2]
    assert messages(row) == TURNS
    assert json.loads(row["others"]) == {"data": {"lang": "en"}, **openai(TURNS), "tools": TOOLS}
    assert built.sources["chat"].left_out == {"no conversation in it": 3}


def test_exported_documents_are_read_again(tmp_path: Path) -> None:
    _, (row,) = build(tmp_path / "a", [{**openai(TURNS), "tools": TOOLS}])
    export_documents(tmp_path / "a" / "out", tmp_path / "exported")
    files = [str(path) for path in (tmp_path / "exported").glob("train/*.jsonl")]
    _, (again,) = build(tmp_path / "b", [], paths=files, fields={"content": "others.messages"})
    assert Conversation.from_json(json.loads(again["others"])) == Conversation.from_json(json.loads(row["others"]))


MALFORMED = [
    ("no conversation in it", {"text": "an article"}),
    ("no conversation in it", {"messages": "hi"}),
    ("no messages", {"messages": []}),
    ("no assistant message", openai(TURNS[:1])),
    ("message is not an object", {"conversations": ["hi"]}),
    ("unknown role", {"messages": [{"role": "narrator", "content": "once"}]}),
    ("unknown role", {"messages": [{"content": "once"}]}),
    ("content is not text", {"instruction": 5, "output": "five"}),
    ("content is not text", {"instruction": "five", "output": None}),
    ("content is not text", {"conversation": [{"human": "a", "assistant": ["b"]}]}),
    ("content is not text", {"chat": {"turn_1": {"Human": "a", "MOSS": None}}}),
    ("empty message", {"instruction": "a", "input": "b", "output": " "}),
    ("history is not a list of pairs", {"instruction": "a", "output": "b", "history": [["a"]]}),
    ("not exactly one instance", {"instruction": "a", "instances": []}),
    ("tool call that is not JSON", {"chat": {"turn_1": {"Human": "a", "Commands": "Search()", "MOSS": "b"}}}),
    ("broken tool call", {"conversations": [{"from": "function_call", "value": "[" * 50_000}]}),
    ("broken list of tools", {**openai(TURNS), "tools": "search"}),
    ("no messages", {"chat": {"turn_": {}}}),
]


def test_malformed_conversations_are_counted_by_reason(tmp_path: Path) -> None:
    expected: dict[str, int] = {}
    for reason, _ in MALFORMED:
        expected[reason] = expected.get(reason, 0) + 1
    built, kept = build(tmp_path, [*(record for _, record in MALFORMED), openai(TURNS)])
    assert [messages(row) for row in kept] == [TURNS]
    assert built.sources["chat"].left_out == expected
    assert built.left_out["chat"].record_files["unknown role"].first == ["chat.jsonl"]
    assert "chat.jsonl#5: unknown role" in built.sources["chat"].quarantine


def test_a_text_file_beside_conversations_is_counted_and_not_read_as_one(tmp_path: Path, raw: Path) -> None:
    (raw / "README.md").write_text("What these conversations are about.")
    with pytest.raises(Z2aError, match="no conversation in it"):
        build(tmp_path, [], paths=[str(raw)])


def test_a_text_source_says_that_its_records_are_conversations(tmp_path: Path) -> None:
    with pytest.raises(Z2aError, match=CHAT_IN_TEXT):
        build(tmp_path, [sharegpt(TURNS)], kind="text")


def test_filters_change_each_message_and_judge_the_whole(tmp_path: Path) -> None:
    leak = "AKIA" + "ABCDEFGHIJKLMNOP"[::-1]
    private = [("user", "write to me at\u200b me@mail-host.com"), ("assistant", "To me@mail-host.com:   \nhi")]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "mail", "arguments": {"to": "me@mail-host.com"}}],
    }
    records = [{"messages": [*openai(private)["messages"], call]}, openai([("user", "key?"), ("assistant", leak)])]
    built, (row,) = build(tmp_path, records)
    assert messages(row) == [("user", "write to me at <email>"), ("assistant", "To <email>:\nhi"), ("assistant", "")]
    assert "mail-host" not in row["others"] + row["content"]
    assert row["content"] == Conversation.from_json(json.loads(row["others"])).text
    counts = built.sources["chat"]
    assert {reason: part.documents for reason, part in counts.dropped.items()} == {"secrets: secret": 1}
    assert counts.changed == {"normalize": 1, "pii": 1}


def test_a_conversation_that_a_filter_leaves_without_a_message_is_dropped(tmp_path: Path) -> None:
    built, kept = build(tmp_path, [openai([("user", "a"), ("assistant", "\u200b")]), openai(TURNS)])
    assert len(kept) == 1
    assert [*built.sources["chat"].dropped] == ["normalize: nothing left"]


def test_short_answers_are_kept_unless_the_recipe_lists_filters(tmp_path: Path) -> None:
    short = openai([("user", "2+2?"), ("assistant", "4")])
    assert len(build(tmp_path / "a", [short])[1]) == 1
    built, kept = build(
        tmp_path / "b", [short, openai([(r, t * 9) for r, t in TURNS])], options={"filters": ["too_short"]}
    )
    assert len(kept) == 1
    assert [*built.sources["chat"].dropped] == ["too_short: too short"]


def test_duplicates_are_dropped_and_gids_stay(tmp_path: Path) -> None:
    built, kept = build(tmp_path / "a", [openai(TURNS), sharegpt(TURNS), openai(TURNS[:2])])
    assert len(kept) == 2
    assert built.sources["chat"].dropped["exact copy"].documents == 1
    _, again = build(tmp_path / "b", [openai(TURNS[:2]), sharegpt(TURNS)])
    assert {row["gid"] for row in again} == {row["gid"] for row in kept}


def many(count: int) -> list[Row]:
    return [openai([("system", "You are a helpful assistant of the company."), ("user", f"What is {n} plus {n}?"),
                    ("assistant", f"It is {2 * n}.")]) for n in range(count)]  # fmt: skip


def test_a_rebuild_gives_the_same_bytes(tmp_path: Path) -> None:
    records = many(60)
    options = {"holdout": 0.2}
    one, first = build(tmp_path / "a", records, options=options)
    assert all(row["content"].startswith("You are a helpful") and len(messages(row)) == 3 for row in first)
    assert {row["data_src"] for row in first} == {"chat"}
    assert one.splits["valid"]["chat"].documents
    assert build(tmp_path / "b", records, options=options)[0].files == one.files
    assert build_corpus(recipe_of(tmp_path / "a", options), tmp_path / "a" / "out").reused


def test_a_conversation_that_copies_validation_text_is_dropped_as_a_whole(tmp_path: Path) -> None:
    text = book("chat")
    quoting = openai([("user", "Recite the book."), ("assistant", text), ("user", "Thanks."), ("assistant", "Bye.")])
    for name, record in (("book", {"text": text}), ("chat", quoting), ("other", many(1)[0])):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record))
    chat_paths = [str(tmp_path / f"{name}.jsonl") for name in ("chat", "other")]
    sources = [
        SourceRecipe(name="book", paths=[str(tmp_path / "book.jsonl")]),
        SourceRecipe(name="chat", kind="chat", paths=chat_paths),
    ]
    built = build_corpus(CorpusRecipe(sources=sources, filters=[], holdout=0.1), tmp_path / "out")
    chats = [row for row in rows(tmp_path / "out") if row["data_src"] == "chat"]
    assert [len(messages(row)) for row in chats] == [3]
    assert built.sources["chat"].dropped[COPY].documents == 1


def test_long_conversations_of_a_small_source_are_not_cut(tmp_path: Path) -> None:
    chat = openai([("user", "Tell me a book."), ("assistant", book("long"))])
    _, (row,) = build(tmp_path, [chat], options={"filters": [], "holdout": 0.1})
    assert len(messages(row)) == 2


def test_sniff_recognizes_conversations(tmp_path: Path) -> None:
    for shape in ("openai", "sharegpt", "pairs", "moss"):
        (tmp_path / f"{shape}.jsonl").write_text(json.dumps(SHAPES[shape](TURNS)) + "\n")
        content = sniff(tmp_path / f"{shape}.jsonl").content
        assert content is not None
        assert "kind: chat" in content.source
        assert content.preview["content"].startswith("Who are you?")


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ("mapping: alpaca", "mapping is for kind: text"),
        ("fields: {content: '{a}'}", "names one field"),
        ("kind: talk", "kind"),
    ],
)
def test_options_that_do_not_fit_conversations_are_refused(extra: str, problem: str) -> None:
    kind = "" if extra.startswith("kind") else "kind: chat, "
    with pytest.raises(Z2aError, match=problem):
        parse_recipe(f"corpus: {{sources: [{{name: a, paths: [x], {kind}{extra}}}]}}")


COUNTS = {  # documents that are read, and records that are malformed
    "alpaca_en_5k.json": (4999, 1), "alpaca_zh_3k.json": (2996, 4), "fastchat_dummy_conversation.json": (500, 0),
    "llamafactory_glaive_toolcall_en_demo.json": (300, 0), "llamafactory_identity.json": (91, 0),
    "llamafactory_v1_sft_demo.jsonl": (500, 0), "moss_multiturn_dir": (200, 0),
    "self_instruct_seed_tasks.jsonl": (175, 0), "sharegpt_zh_300.jsonl": (299, 1),
}  # fmt: skip


@pytest.mark.slow
def test_published_files_are_read_whole(shared_corpus: Path, tmp_path: Path) -> None:
    sources = [
        SourceRecipe(name=name.partition(".")[0], kind="chat", paths=[str(shared_corpus / "sft" / name)])
        for name in COUNTS
    ]
    built = build_corpus(CorpusRecipe(sources=sources, filters=[], holdout=0), tmp_path / "out")
    for name, (documents, malformed) in COUNTS.items():
        counts = built.sources[name.partition(".")[0]]
        assert (counts.read.documents, sum(counts.left_out.values())) == (documents, malformed), name
