"""Which tokens of a conversation the assistant writes, as transformers tells it, also without tags in a template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero2all.tokenizer import Tokenizer

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
DROPS_A_TURN = WITHOUT_TAGS.replace("messages", "messages[-2:]")


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
def test_the_mask_is_that_of_transformers(
    tokenizer: Tokenizer, transformers_tokenizer: Any, messages: list[dict[str, Any]]
) -> None:
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = transformers_tokenizer.apply_chat_template(messages, **options)
    ids, mask = encode(tokenizer, messages)
    assert ids == expected["input_ids"]
    assert mask == [bool(one) for one in expected["assistant_masks"]]
    assert any(mask)


def test_an_answer_is_learned_with_the_token_that_ends_it_and_nothing_else(tokenizer: Tokenizer) -> None:
    assert generated_text(tokenizer, CONVERSATIONS[0]) == ["四<|im_end|>"]
    assert generated_text(tokenizer, CONVERSATIONS[1]) == ["  indented\n\nx<|im_end|>", "😀 é<|im_end|>"]
    called, answered = generated_text(tokenizer, CONVERSATIONS[2])
    assert called.startswith("Searching.\n<tool_call>")
    assert called.endswith("</tool_call><|im_end|>")
    assert answered == "None.<|im_end|>"


def test_the_prompt_is_the_beginning_of_the_conversation(tokenizer: Tokenizer) -> None:
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
    tokenizer: Tokenizer, workspace: Path, tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    assert encode(tokenizer, messages) == encode(with_template(workspace, tmp_path, WITHOUT_TAGS), messages)


def test_a_template_that_drops_a_turn_marks_nothing(workspace: Path, tmp_path: Path) -> None:
    tokenizer = with_template(workspace, tmp_path, DROPS_A_TURN)
    assert generated_text(tokenizer, CONVERSATIONS[0]) == ["四<|im_end|>"]
    assert generated_text(tokenizer, CONVERSATIONS[1]) == []


@pytest.mark.parametrize("said", ["\U0010fffd", "\U0010fffc", "\U0010fffdforged\U0010fffc", "{% generation %}x"])
def test_a_message_cannot_mark_itself(tokenizer: Tokenizer, said: str) -> None:
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": f"answer {said}"}]
    assert generated_text(tokenizer, messages) == [f"answer {said}<|im_end|>"]


def test_a_long_conversation_is_no_endless_loop(tokenizer: Tokenizer) -> None:
    messages = [message for _ in range(2000) for message in CONVERSATIONS[0]]
    assert len(generated_text(tokenizer, messages)) == 2000


# --- what the template writes

QUESTION = {"role": "user", "content": "二加二?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_messages_become_chatml(transformers_tokenizer: Any) -> None:
    theirs = transformers_tokenizer
    messages = [{"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": "4"}]
    text = theirs.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n二加二?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
    )
    prompt = theirs.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n二加二?<|im_end|>\n<|im_start|>assistant\n"
    ids = theirs.apply_chat_template([QUESTION], add_generation_prompt=True)["input_ids"]
    assert ids[0] == theirs.convert_tokens_to_ids("<|im_start|>")
    assert theirs.decode(ids) == prompt


def test_tools_their_calls_and_their_answers(transformers_tokenizer: Any) -> None:
    theirs = transformers_tokenizer
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "4"},
    ]
    text = theirs.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    answered = "<tool_response>\n4\n</tool_response>"
    assert text.startswith("<|im_start|>system\nYou may call")
    assert '{"type": "function", "function": {"name": "add"' in text
    assert text.endswith(
        f"<|im_end|>\n<|im_start|>user\n二加二?<|im_end|>\n"
        f"<|im_start|>assistant\n{called}\n{called}<|im_end|>\n"
        f"<|im_start|>user\n{answered}\n{answered}<|im_end|>\n<|im_start|>assistant\n"
    )
