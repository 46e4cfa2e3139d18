from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

QUESTION = {"role": "user", "content": "二加二?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def theirs(workspace: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(workspace / "tokenizer")


def test_messages_become_chatml(theirs: Any) -> None:
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


def test_tools_their_calls_and_their_answers(theirs: Any) -> None:
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
