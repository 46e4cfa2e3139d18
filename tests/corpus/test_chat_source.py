"""Sources of conversations: their shapes, what is malformed, and that messages survive every stage of a build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.builds import Row, corpus_of, rows_of, source_of, write_lines
from tests.corpus.test_validation import book
from zero2all.base.conversation import ChatExample, Conversation, MalformedConversationError, SourceKind
from zero2all.base.errors import RecipeError, Z2aError
from zero2all.corpus import BuiltCorpus, build_corpus
from zero2all.corpus.chat_shapes import find_example
from zero2all.corpus.corpus_export import export_documents
from zero2all.corpus.ingest import CHAT_IN_TEXT
from zero2all.corpus.sniff import sniff
from zero2all.corpus.validation_split import COPY
from zero2all.recipe import CorpusRecipe, SourceRecipe, parse_recipe

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


def recipe_of(root: Path, options: Row | None = None, path: Path | None = None, **source: Any) -> CorpusRecipe:
    """With the default filters of conversations."""
    given = source_of(path or root / "chat.jsonl", "chat", **{"kind": "chat", **source})
    return CorpusRecipe(**{"sources": [given], "holdout": 0.0, **(options or {})})


def build(root: Path, records: list[Any], options: Row | None = None, **source: Any) -> tuple[BuiltCorpus, list[Row]]:
    """Records as JSONL; the manifest, and the rows of both splits."""
    root.mkdir(exist_ok=True)
    write_lines(root / "chat.jsonl", records)
    return build_corpus(recipe_of(root, options, **source), root / "out"), rows_of(root / "out")


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
    _, (row,) = build(tmp_path, [], path=raw)
    assert messages(row) == TURNS


def test_conversations_in_parquet_have_null_fields(tmp_path: Path) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    table = pa.Table.from_pylist([{"prompt_id": "p", "messages": [*openai(TURNS)["messages"], calls]}])
    pq.write_table(table, tmp_path / "chat.parquet")
    _, (row,) = build(tmp_path, [], path=tmp_path / "chat.parquet")
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
    fields = {"content": "others.messages"}
    _, (again,) = build(tmp_path / "b", [], path=tmp_path / "exported" / "train", fields=fields)
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
        build(tmp_path, [], path=raw)


def test_a_text_source_says_that_its_records_are_conversations(tmp_path: Path) -> None:
    with pytest.raises(Z2aError, match=CHAT_IN_TEXT):
        build(tmp_path, [sharegpt(TURNS)], kind="text")


def test_filters_change_each_message_and_judge_the_whole(tmp_path: Path) -> None:
    leak = "AKIA" + "ABCDEFGHIJKLMNOP"[::-1]
    private = [("user", "write to me at\u200b me@mail-host.com"), ("assistant", "To me@mail-host.com:   \nhi")]
    calls = [{"name": "mail", "arguments": {"to": "me@mail-host.com"}}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    records = [{"messages": [*openai(private)["messages"], call]}, openai([("user", "key?"), ("assistant", leak)])]
    built, (row,) = build(tmp_path, records)
    assert messages(row) == [("user", "write to me at <email>"), ("assistant", "To <email>:\nhi"), ("assistant", "")]
    assert "mail-host" not in row["others"] + row["content"]
    assert row["content"] == Conversation.from_json(json.loads(row["others"])).text
    counts = built.sources["chat"]
    assert {reason: part.documents for reason, part in counts.dropped.items()} == {"secrets: secret": 1}
    assert counts.changed == {"normalize": 1, "pii": 1}


SHORT = openai([("user", "2+2?"), ("assistant", "4")])


@pytest.mark.parametrize(
    ("records", "options", "dropped"),
    [
        ([SHORT], {}, []),  # a default filter of text would drop it
        ([SHORT, openai([(r, t * 9) for r, t in TURNS])], {"filters": ["too_short"]}, ["too_short: too short"]),
        ([openai([("user", "a"), ("assistant", "\u200b")]), openai(TURNS)], {}, ["normalize: nothing left"]),
    ],
    ids=["short", "short with a filter", "a message without text"],
)
def test_filters_drop_whole_conversations(records: list[Row], options: Row, dropped: list[str], tmp_path: Path) -> None:
    built, kept = build(tmp_path, records, options=options)
    assert len(kept) == 1
    assert [*built.sources["chat"].dropped] == dropped


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
    book_source = source_of(write_lines(tmp_path / "book.jsonl", [{"text": text}]), "book")
    chats = write_lines(tmp_path / "chat.jsonl", [quoting, many(1)[0]])
    chat_source = SourceRecipe(name="chat", kind="chat", paths=[str(chats)])
    built = build_corpus(corpus_of(book_source, chat_source, holdout=0.1), tmp_path / "out")
    rows = [row for row in rows_of(tmp_path / "out") if row["data_src"] == "chat"]
    assert [len(messages(row)) for row in rows] == [3]
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
    sources = (source_of(shared_corpus / "sft" / name, name.partition(".")[0], kind="chat") for name in COUNTS)
    built = build_corpus(corpus_of(*sources), tmp_path / "out")
    for name, (documents, malformed) in COUNTS.items():
        counts = built.sources[name.partition(".")[0]]
        assert (counts.read.documents, sum(counts.left_out.values())) == (documents, malformed), name


# --- pairs and labels

ASKED, GOOD, BAD = "What is 2 + 2?", "4", "5"


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def said(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


GOOD_MESSAGE, BAD_MESSAGE = message("assistant", GOOD), message("assistant", BAD)
CHOSEN, REJECTED = ([message("user", ASKED), answer] for answer in (GOOD_MESSAGE, BAD_MESSAGE))
PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "messages": {"prompt": [message("user", ASKED)], "chosen": [GOOD_MESSAGE], "rejected": [BAD_MESSAGE]},
    "the prompt in both": {"chosen": CHOSEN, "rejected": REJECTED},
    "the prompt in both, and once more": {"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED},
    "ShareGPT": {"conversations": [said("human", ASKED)], "chosen": said("gpt", GOOD), "rejected": said("gpt", BAD)},
    "ShareGPT with texts": {"conversations": [said("human", ASKED)], "chosen": GOOD, "rejected": BAD},
    "two messages": {"chosen_messages": CHOSEN, "rejected_messages": REJECTED},
    "Alpaca": {"instruction": ASKED, "input": "", "output": [GOOD, BAD]},
    "HH": {"chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {GOOD}", "rejected": f"\n\nHuman: {ASKED}\n\nAssistant: {BAD}"},
    "question": {"question": ASKED, "response_chosen": GOOD, "response_rejected": BAD},
}


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_every_shape_of_a_pair_gives_the_same_example(record: dict[str, Any]) -> None:
    example = find_example(record, "preference").example
    assert example.rejected is not None
    assert [one.to_json() for one in example.conversation.messages] == CHOSEN
    assert [one.to_json() for one in example.rejected.messages] == REJECTED
    assert example.first_learned == 1
    assert ChatExample.from_json(example.to_json(), "preference") == example
    assert example.text == f"{ASKED}\n\n{GOOD}\n\n{BAD}"


def test_the_prompt_of_several_turns_and_its_system_prompt_belong_to_both_answers() -> None:
    history = [["Hello", "Hi"]]
    record = {"prompt": ASKED, "history": history, "chosen": GOOD, "rejected": BAD, "system": "Be brief."}
    example = find_example(record, "preference").example
    assert [one.role for one in example.conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert example.first_learned == 4


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "completion": GOOD, "label": True},
        {"prompt": [message("user", ASKED)], "completion": [GOOD_MESSAGE], "label": 1},
        {"messages": CHOSEN, "label": True},
        {"instruction": ASKED, "output": GOOD, "kto_tag": True},
    ],
)
def test_every_shape_of_a_label_gives_the_same_example(record: dict[str, Any]) -> None:
    example = find_example(record, "rating").example
    assert (example.desirable, example.first_learned) == (True, 1)
    assert [one.content for one in example.conversation.messages] == [ASKED, GOOD]
    with pytest.raises(MalformedConversationError, match="no label"):
        find_example({name: value for name, value in record.items() if name not in ("label", "kto_tag")}, "rating")


@pytest.mark.parametrize(
    ("record", "kind", "reason"),
    [
        ({"prompt": ASKED, "chosen": GOOD, "rejected": GOOD}, "preference", "chosen and rejected are equal"),
        ({"prompt": ASKED, "chosen": GOOD}, "preference", "no chosen and rejected answer in it"),
        ({"chosen": GOOD, "rejected": BAD}, "preference", "no prompt before the answers"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": ""}, "preference", "empty message"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": None}, "preference", "message is not an object"),
        ({"prompt": ASKED, "chosen": 4, "rejected": 5}, "preference", "message is not an object"),
        ({"instruction": ASKED, "output": [GOOD]}, "preference", "no chosen and rejected answer in it"),
        (
            {"prompt": ASKED, "chosen": [message("user", "x")], "rejected": BAD},
            "preference",
            "no assistant message",
        ),
        # of another kind: the kind that reads it is named
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "chat", "kind: preference"),
        ({"chosen": CHOSEN, "rejected": CHOSEN}, "chat", "kind: preference"),
        ({"chosen_messages": CHOSEN, "rejected_messages": CHOSEN}, "chat", "kind: preference"),
        ({"question": "q", "response_chosen": "a", "response_rejected": "b"}, "chat", "kind: preference"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "rating", "kind: preference"),
        ({"prompt": "q", "completion": "a", "label": True}, "chat", "kind: rating"),
        ({"messages": CHOSEN}, "preference", "kind: chat"),
        ({"text": "words"}, "chat", "no conversation in it"),
    ],
)
def test_a_malformed_record_has_a_reason(record: dict[str, Any], kind: SourceKind, reason: str) -> None:
    with pytest.raises(MalformedConversationError, match=reason):
        find_example(record, kind)


def examples_of(out: Path, kind: SourceKind, path: Path) -> tuple[int, dict[str, int], list[ChatExample]]:
    """Records that were read, reasons for what was left out, and the examples."""
    counts = build_corpus(corpus_of(source_of(path, kind=kind), filters=None), out).sources["s"]
    examples = [ChatExample.from_json(json.loads(row["others"]), kind) for row in rows_of(out, "train")]
    return counts.read.documents, counts.left_out, examples


def test_filters_change_both_answers_and_other_fields_stay(tmp_path: Path) -> None:
    record = {"prompt": "Mail?", "chosen": "zhang.wei@gmail.com", "rejected": "No.", "source": "x", "label": "kept"}
    _, _, (example,) = examples_of(tmp_path / "out", "preference", write_lines(tmp_path / "pairs.jsonl", [record]))
    assert "gmail" not in example.conversation.messages[-1].content
    others = json.loads(rows_of(tmp_path / "out")[0]["others"])
    assert (others["source"], others["label"]) == ("x", "kept")


def test_published_pairs_and_labels_are_read_whole(shared_corpus: Path, tmp_path: Path) -> None:
    directory = shared_corpus / "dpo"
    counts = {}
    for path in sorted(directory.glob("*dpo*")):
        counts[path.name], reasons, examples = examples_of(tmp_path / path.stem, "preference", path)
        assert not reasons, (path, reasons)
        assert all(example.rejected is not None and example.first_learned >= 1 for example in examples)
    assert counts == {
        "llamafactory_dpo_en_demo.json": 300,
        "llamafactory_dpo_zh_demo.json": 300,
        "llamafactory_v1_dpo_demo.jsonl": 10,
        "medicalgpt_dpo_zh_500.jsonl": 499,
    }
    ratings, reasons, examples = examples_of(tmp_path / "kto", "rating", directory / "llamafactory_kto_en_demo.json")
    assert (ratings, reasons) == (300, {})
    assert {example.desirable for example in examples} == {True, False}


def test_settings_of_other_kinds_are_refused() -> None:
    source = "{name: a, paths: [x], kind: preference, fields: {content: data}, mapping: alpaca}"
    with pytest.raises(RecipeError) as caught:
        parse_recipe("", [f"corpus.sources=[{source}]"])
    assert "fields.content is for kind: text and chat" in str(caught.value)
    assert "mapping is for kind: text" in str(caught.value)
