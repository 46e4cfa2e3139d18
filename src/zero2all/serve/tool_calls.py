"""Calls of tools in what a model wrote, in the form of Hermes and Qwen, which our chat template renders."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from zero2all.tokenizer.vocabulary import TOOL_CALL, TOOL_CALL_END


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON."""


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text before the calls, and the calls. What is no valid call stays text."""
    content, *blocks = text.split(TOOL_CALL)
    calls = []
    for block in blocks:
        body, found, rest = block.partition(TOOL_CALL_END)
        call = _parse_call(body) if found else None
        if call is None:
            content += TOOL_CALL + block
        else:
            calls.append(call)
            content += rest if rest.strip() else ""
    return content, calls


def _parse_call(body: str) -> ToolCall | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", value["name"], json.dumps(arguments, ensure_ascii=False))
