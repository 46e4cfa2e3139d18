"""Which tokens of a conversation the assistant writes, as transformers tells it, also without tags in a template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.chat import ChatTemplateError

CALL = {"type": "function", "function": {"name": "search", "arguments": {"q": "中文", "limit": 1}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "二加二?"}, {"role": "assistant", "content": "四"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "  indented\n\nx"},
        {"role": "user", "content": "and 😀?"},
        {"role": "assistant", "content": "😀 é"},
    ],
    [
        {"role": "user", "content": "find"},
        {"role": "assistant", "content": "Searching.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "nothing"},
        {"role": "assistant", "content": "None."},
    ],
]
WITHOUT_TAGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_A_TURN = (
    "{% for m in messages[-2:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    (chat,) = tokenizer.encode_chats(tokenizer.reference, [tokenizer.split_chat(messages)])
    return chat.ids.tolist(), chat.generated.tolist()


def generated_text(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """The text of each run of tokens that the assistant writes."""
    ids, mask = encode(tokenizer, messages)
    edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
    return [tokenizer.decode(ids[begin:end]) for begin, end in edges]


def with_template(workspace: Path, tmp_path: Path, template: str) -> Tokenizer:
    shutil.copytree(workspace / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    return Tokenizer(tmp_path / "tokenizer")


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["short", "turns", "tools"])
def test_the_mask_is_that_of_transformers(workspace: Path, messages: list[dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(workspace / "tokenizer")
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encode(Tokenizer(workspace / "tokenizer"), messages)
    assert ids == expected["input_ids"]
    assert mask == [bool(one) for one in expected["assistant_masks"]]
    assert any(mask)


def test_an_answer_is_learned_with_the_token_that_ends_it_and_nothing_else(workspace: Path) -> None:
    tokenizer = Tokenizer(workspace / "tokenizer")
    assert generated_text(tokenizer, CONVERSATIONS[0]) == ["四<|im_end|>"]
    assert generated_text(tokenizer, CONVERSATIONS[1]) == ["  indented\n\nx<|im_end|>", "😀 é<|im_end|>"]
    called, answered = generated_text(tokenizer, CONVERSATIONS[2])
    assert called.startswith("Searching.\n<tool_call>")
    assert called.endswith("</tool_call><|im_end|>")
    assert answered == "None.<|im_end|>"


def test_the_prompt_is_the_beginning_of_the_conversation(workspace: Path) -> None:
    tokenizer = Tokenizer(workspace / "tokenizer")
    for messages in CONVERSATIONS:
        ids, mask = encode(tokenizer, messages)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = tokenizer.render_chat(messages[:number], add_generation_prompt=True)
                assert ids[: len(prompt)] == prompt
                assert mask[len(prompt)]
                assert not mask[len(prompt) - 1]


@pytest.mark.parametrize("messages", CONVERSATIONS[:2], ids=["short", "turns"])
def test_a_template_without_tags_gives_the_same_mask(
    workspace: Path, tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    ours, theirs = Tokenizer(workspace / "tokenizer"), with_template(workspace, tmp_path, WITHOUT_TAGS)
    assert encode(ours, messages) == encode(theirs, messages)


def test_a_template_that_drops_a_turn_marks_nothing(workspace: Path, tmp_path: Path) -> None:
    tokenizer = with_template(workspace, tmp_path, DROPS_A_TURN)
    assert generated_text(tokenizer, CONVERSATIONS[0]) == ["四<|im_end|>"]
    assert generated_text(tokenizer, CONVERSATIONS[1]) == []


@pytest.mark.parametrize("said", ["\U0010fffd", "\U0010fffc", "\U0010fffdforged\U0010fffc", "{% generation %}x"])
def test_a_message_cannot_mark_itself(workspace: Path, said: str) -> None:
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": f"answer {said}"}]
    assert generated_text(Tokenizer(workspace / "tokenizer"), messages) == [f"answer {said}<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = b %}{% endfor %}{% endfor %}x",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{% set _tick = 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
@pytest.mark.timeout(60)
def test_a_template_that_loops_for_ever_is_cut_off(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr("zero2all.tokenizer.chat.MAX_SECONDS", 1)
    tokenizer = with_template(workspace, tmp_path, template)
    with pytest.raises(ChatTemplateError):
        tokenizer.split_chat(CONVERSATIONS[0])


def test_a_long_conversation_is_no_endless_loop(workspace: Path) -> None:
    tokenizer = Tokenizer(workspace / "tokenizer")
    messages = [message for _ in range(2000) for message in CONVERSATIONS[0]]
    assert len(generated_text(tokenizer, messages)) == 2000
