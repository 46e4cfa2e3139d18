"""The shapes in which conversations are published: OpenAI, ShareGPT and FastChat, question and answer, Alpaca, MOSS."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero2all.conversation import BROKEN_CALL, Conversation, MalformedConversationError, parse_nested_json

MESSAGE_FIELDS = ("messages", "conversations", "conversation")
ROLE_NAMES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")  # an assistant's message that is a call, as JSON
NO_CONVERSATION = "no conversation in it"
NOT_TEXT = "content is not text"
_MOSS_MARKS = re.compile(r"^\s*<\|[A-Za-z ]+\|>:\s*|<eo[a-z]>\s*$")
_MOSS_TURN = re.compile(r"turn_(\d{1,6})")
_MOSS_EMPTY = ("", "None")
_MOSS_TOOL_FIELDS = ("Commands", "Tool Responses")


@dataclass(frozen=True)
class FoundConversation:
    conversation: Conversation
    used: frozenset[str]
    """The fields of the record that it was made of."""


@dataclass(frozen=True)
class _Shape:
    """A record's messages in OpenAI's form, and the fields they were made of."""

    messages: list[dict[str, Any]]
    used: tuple[str, ...]
    system: str = "system"
    """The field with the system prompt."""


def find_conversation(record: Mapping[str, Any], field: str | None = None) -> FoundConversation:
    """The conversation of a record, by its shape, or with its messages in ``field``. Raises an error without one."""
    shape = _read_shape(record) if field is None else _Shape(_read_messages(record.get(field)), (field,))
    if shape is None:
        raise MalformedConversationError(NO_CONVERSATION)
    said = shape.messages
    system = record.get(shape.system)
    if isinstance(system, str) and not any(message.get("role") == "system" for message in said[:1]):
        said = [{"role": "system", "content": system}, *said]
    conversation = Conversation.from_json({"messages": said, "tools": record.get("tools")})
    return FoundConversation(conversation, frozenset((*shape.used, shape.system, "tools")))


def has_messages(record: Mapping[str, Any]) -> bool:
    """Whether a record is a conversation and no text: in every shape but Alpaca's, which can be read as either."""
    return isinstance(record.get("chat"), dict) or any(is_message_list(record.get(name)) for name in MESSAGE_FIELDS)


def is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    """Whether a value is one message, or one question with its answer, and not a record of its own."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role") or value.get("from"), str) or {"human", "assistant"} <= value.keys()


def _read_shape(record: Mapping[str, Any]) -> _Shape | None:
    for name in MESSAGE_FIELDS:
        if isinstance(record.get(name), list):
            return _Shape(_read_messages(record[name]), (name,))
    if isinstance(record.get("chat"), dict):
        return _Shape(_read_moss(record["chat"]), ("chat",), system="meta_instruction")
    if "instruction" in record and ("output" in record or "instances" in record):
        used = ("instruction", "input", "output", "history", "instances")
        return _Shape(_read_alpaca(record), used)
    return None


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise MalformedConversationError(NO_CONVERSATION)
    return [message for one in messages for message in _read_message(one)]


def _read_message(message: Any) -> list[dict[str, Any]]:
    if not isinstance(message, dict):
        raise MalformedConversationError("message is not an object")
    role = message.get("role") or message.get("from")
    content = message.get("content") if message.get("content") is not None else message.get("value")
    if role is None and {"human", "assistant"} <= message.keys():
        return _turn(message["human"], message["assistant"])
    if role in CALL_ROLES:
        calls = parse_nested_json(content, BROKEN_CALL)
        return [{"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}]
    if not isinstance(role, str) or role.lower() not in ROLE_NAMES:
        raise MalformedConversationError("unknown role")
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):  # OpenAI's form before there were several calls
        calls = [message["function_call"]]
    return [{"role": ROLE_NAMES[role.lower()], "content": content, "tool_calls": calls}]


def _turn(question: Any, answer: Any) -> list[dict[str, Any]]:
    if not isinstance(question, str) or not isinstance(answer, str):
        raise MalformedConversationError(NOT_TEXT)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _read_alpaca(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``input`` follows the instruction on a line of its own. Seed tasks of self-instruct have it in ``instances``."""
    last: Any = record
    if "output" not in record:
        instances = record["instances"]
        if not isinstance(instances, list) or len(instances) != 1 or not isinstance(instances[0], dict):
            raise MalformedConversationError("not exactly one instance")
        last = instances[0]
    question = [record["instruction"], last.get("input") or ""]
    if not all(isinstance(text, str) for text in question):
        raise MalformedConversationError(NOT_TEXT)
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise MalformedConversationError("history is not a list of pairs")
    asked = "\n".join(text for text in question if text.strip())
    return [message for turn in (*history, [asked, last.get("output")]) for message in _turn(*turn)]


def _read_moss(chat: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turns by number, without the marks around each text."""
    numbered = [(int(found[1]), turn) for name, turn in chat.items() if (found := _MOSS_TURN.fullmatch(name))]
    messages = []
    for _, turn in sorted(numbered, key=lambda one: one[0]):
        if not isinstance(turn, dict):
            raise MalformedConversationError("message is not an object")
        if any(_strip_marks(turn.get(name) or "") not in _MOSS_EMPTY for name in _MOSS_TOOL_FIELDS):
            raise MalformedConversationError("tool call that is not JSON")
        messages += _turn(_strip_marks(turn.get("Human")), _strip_marks(turn.get("MOSS")))
    return messages


def _strip_marks(text: Any) -> str:
    if not isinstance(text, str):
        raise MalformedConversationError(NOT_TEXT)
    return _MOSS_MARKS.sub("", text)
