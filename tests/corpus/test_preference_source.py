"""Sources of pairs and of labels: the shapes in which they are published, and what is malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from zero2all.base.conversation import ChatExample, MalformedConversationError, SourceKind
from zero2all.base.errors import RecipeError
from zero2all.corpus import build_corpus
from zero2all.corpus.chat_shapes import find_example
from zero2all.recipe import CorpusRecipe, SourceRecipe, parse_recipe

ASKED, GOOD, BAD = "What is 2 + 2?", "4", "5"


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def said(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


GOOD_MESSAGE, BAD_MESSAGE = message("assistant", GOOD), message("assistant", BAD)
PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "messages": {"prompt": [message("user", ASKED)], "chosen": [GOOD_MESSAGE], "rejected": [BAD_MESSAGE]},
    "the prompt in both": {
        "chosen": [message("user", ASKED), GOOD_MESSAGE],
        "rejected": [message("user", ASKED), BAD_MESSAGE],
    },
    "the prompt in both, and once more": {
        "prompt": ASKED,
        "chosen": [message("user", ASKED), GOOD_MESSAGE],
        "rejected": [message("user", ASKED), BAD_MESSAGE],
    },
    "ShareGPT": {"conversations": [said("human", ASKED)], "chosen": said("gpt", GOOD), "rejected": said("gpt", BAD)},
    "ShareGPT with texts": {"conversations": [said("human", ASKED)], "chosen": GOOD, "rejected": BAD},
    "two messages": {
        "chosen_messages": [message("user", ASKED), GOOD_MESSAGE],
        "rejected_messages": [message("user", ASKED), BAD_MESSAGE],
    },
    "Alpaca": {"instruction": ASKED, "input": "", "output": [GOOD, BAD]},
    "HH": {"chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {GOOD}", "rejected": f"\n\nHuman: {ASKED}\n\nAssistant: {BAD}"},
    "question": {"question": ASKED, "response_chosen": GOOD, "response_rejected": BAD},
}


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_every_shape_of_a_pair_gives_the_same_example(record: dict[str, Any]) -> None:
    example = find_example(record, "preference").example
    assert example.rejected is not None
    assert [one.to_json() for one in example.conversation.messages] == [message("user", ASKED), GOOD_MESSAGE]
    assert [one.to_json() for one in example.rejected.messages] == [message("user", ASKED), BAD_MESSAGE]
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
    ("record", "reason"),
    [
        ({"prompt": ASKED, "chosen": GOOD, "rejected": GOOD}, "chosen and rejected are equal"),
        ({"prompt": ASKED, "chosen": GOOD}, "no chosen and rejected answer in it"),
        ({"chosen": GOOD, "rejected": BAD}, "no prompt before the answers"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": ""}, "empty message"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": None}, "message is not an object"),
        ({"prompt": ASKED, "chosen": 4, "rejected": 5}, "message is not an object"),
        ({"instruction": ASKED, "output": [GOOD]}, "no chosen and rejected answer in it"),
        ({"prompt": ASKED, "chosen": [message("user", "no answer")], "rejected": BAD}, "no assistant message"),
    ],
)
def test_a_malformed_pair_has_a_reason(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedConversationError, match=reason):
        find_example(record, "preference")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "completion": GOOD, "label": True},
        {"prompt": [message("user", ASKED)], "completion": [GOOD_MESSAGE], "label": 1},
        {"messages": [message("user", ASKED), GOOD_MESSAGE], "label": True},
        {"instruction": ASKED, "output": GOOD, "kto_tag": True},
    ],
)
def test_every_shape_of_a_label_gives_the_same_example(record: dict[str, Any]) -> None:
    example = find_example(record, "rating").example
    assert (example.desirable, example.first_learned) == (True, 1)
    assert [one.content for one in example.conversation.messages] == [ASKED, GOOD]
    with pytest.raises(MalformedConversationError, match="no label"):
        find_example({name: value for name, value in record.items() if name not in ("label", "kto_tag")}, "rating")


MESSAGES = [message("user", ASKED), GOOD_MESSAGE]


@pytest.mark.parametrize(
    ("record", "kind", "said"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "chat", "kind: preference"),
        ({"chosen": MESSAGES, "rejected": MESSAGES}, "chat", "kind: preference"),
        ({"chosen_messages": MESSAGES, "rejected_messages": MESSAGES}, "chat", "kind: preference"),
        ({"question": "q", "response_chosen": "a", "response_rejected": "b"}, "chat", "kind: preference"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "rating", "kind: preference"),
        ({"prompt": "q", "completion": "a", "label": True}, "chat", "kind: rating"),
        ({"messages": MESSAGES}, "preference", "kind: chat"),
        ({"text": "words"}, "chat", "no conversation in it"),
    ],
)
def test_a_record_of_another_kind_names_the_kind_that_reads_it(
    record: dict[str, Any], kind: SourceKind, said: str
) -> None:
    with pytest.raises(MalformedConversationError, match=said):
        find_example(record, kind)


def build(out: Path, kind: SourceKind, paths: list[str]) -> tuple[int, dict[str, int], list[ChatExample]]:
    """Records that were read, reasons for what was left out, and the examples."""
    recipe = CorpusRecipe(sources=[SourceRecipe(name="it", kind=kind, paths=paths)], holdout=0)
    built = build_corpus(recipe, out)
    rows = [row for path in (out / "train").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    examples = [ChatExample.from_json(json.loads(row["others"]), kind) for row in rows]
    reasons = {reason: count for source in built.sources.values() for reason, count in source.left_out.items()}
    return built.sources["it"].read.documents, reasons, examples


def test_filters_change_both_answers_and_other_fields_stay(tmp_path: Path) -> None:
    record = {"prompt": "Mail?", "chosen": "zhang.wei@gmail.com", "rejected": "No.", "source": "x", "label": "kept"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record))
    _, _, (example,) = build(tmp_path / "out", "preference", [f"{tmp_path}/pairs.jsonl"])
    assert "gmail" not in example.conversation.messages[-1].content
    (path,) = (tmp_path / "out" / "train").glob("*.parquet")
    others = json.loads(pq.read_table(path).to_pylist()[0]["others"])
    assert (others["source"], others["label"]) == ("x", "kept")


def test_published_pairs_and_labels_are_read_whole(shared_corpus: Path, tmp_path: Path) -> None:
    directory = shared_corpus / "dpo"
    counts = {}
    for path in sorted(directory.glob("*dpo*")):
        counts[path.name], reasons, examples = build(tmp_path / path.stem, "preference", [str(path)])
        assert not reasons, (path, reasons)
        assert all(example.rejected is not None and example.first_learned >= 1 for example in examples)
    assert counts == {
        "llamafactory_dpo_en_demo.json": 300,
        "llamafactory_dpo_zh_demo.json": 300,
        "llamafactory_v1_dpo_demo.jsonl": 10,
        "medicalgpt_dpo_zh_500.jsonl": 499,
    }
    ratings, reasons, examples = build(tmp_path / "kto", "rating", [str(directory / "llamafactory_kto_en_demo.json")])
    assert (ratings, reasons) == (300, {})
    assert {example.desirable for example in examples} == {True, False}


def test_settings_of_other_kinds_are_refused() -> None:
    source = "{name: a, paths: [x], kind: preference, fields: {content: data}, mapping: alpaca}"
    with pytest.raises(RecipeError) as caught:
        parse_recipe("", [f"corpus.sources=[{source}]"])
    assert "fields.content is for kind: text and chat" in str(caught.value)
    assert "mapping is for kind: text" in str(caught.value)
