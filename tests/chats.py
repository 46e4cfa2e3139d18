"""Conversations that every engine must render as the tokenizer does."""

from __future__ import annotations

from typing import Any

CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": '{"city": "上海"}'}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "二加二?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ],
]
