"""The shapes in which conversations are published: OpenAI, ShareGPT and FastChat, question and answer, Alpaca, MOSS.

Pairs of answers as in TRL, LLaMA-Factory, UltraFeedback, HH and MedicalGPT; labels as in TRL and LLaMA-Factory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zero2all.base.conversation import (
    BROKEN_CALL,
    ChatExample,
    MalformedConversationError,
    SourceKind,
    parse_nested_json,
)

MESSAGE_FIELDS = ("messages", "conversations", "conversation")
ROLE_NAMES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")  # an assistant's message that is a call, as JSON
PAIR_FIELDS = (
    ("chosen", "rejected"),
    ("chosen_messages", "rejected_messages"),
    ("response_chosen", "response_rejected"),
)
PROMPT_FIELDS = ("prompt", "question")
ANSWER_FIELDS = ("completion", "response")
LABEL_FIELDS = ("label", "kto_tag")
NO_CONVERSATION, NO_PAIR = "no conversation in it", "no chosen and rejected answer in it"
NOT_TEXT = "content is not text"
_MOSS_MARKS = re.compile(r"^\s*<\|[A-Za-z ]+\|>:\s*|<eo[a-z]>\s*$")
_MOSS_TURN = re.compile(r"turn_(\d{1,6})")
_MOSS_EMPTY = ("", "None")
_HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_MOSS_TOOL_FIELDS = ("Commands", "Tool Responses")


@dataclass(frozen=True)
class FoundExample:
    example: ChatExample
    used: frozenset[str]
    """The fields of the record that it was made of."""


@dataclass(frozen=True)
class _Shape:
    """A record's messages in OpenAI's form, and the fields they were made of."""

    messages: list[dict[str, Any]]
    used: tuple[str, ...]
    system: str = "system"
    """The field with the system prompt."""
    rejected: list[dict[str, Any]] | None = None
    """The messages with the rejected answer."""


def find_example(record: Mapping[str, Any], kind: SourceKind = "chat", field: str | None = None) -> FoundExample:
    """What a record holds, by its shape, or with its messages in ``field``. Raises an error if it is of another."""
    if field is not None:
        shape: _Shape | None = _Shape(_read_messages(record.get(field)), (field,))
    elif kind == "preference":
        shape = _read_pair(record)
    else:
        shape = _read_shape(record) or (_read_answer(record) if kind == "rating" else None)
    if shape is None:
        raise MalformedConversationError(_wrong_kind(record, kind))
    value = {"messages": _with_system(shape.messages, record.get(shape.system)), "tools": record.get("tools")}
    used = (*shape.used, shape.system, "tools")
    if shape.rejected is not None:
        value["rejected"] = _with_system(shape.rejected, record.get(shape.system))
    if kind == "rating":
        value["label"] = _read_label(record)
        used += LABEL_FIELDS
    return FoundExample(ChatExample.from_json(value, kind), frozenset(used))


def _wrong_kind(record: Mapping[str, Any], kind: SourceKind) -> str:
    """Why a record is not of a kind, with the kind that it is of if another one reads it."""
    if kind != "preference" and any(all(name in record for name in names) for names in PAIR_FIELDS):
        return "a chosen and a rejected answer, which kind: preference reads"
    if kind == "chat" and any(name in record for name in LABEL_FIELDS) and any(map(record.__contains__, ANSWER_FIELDS)):
        return "an answer with a label, which kind: rating reads"
    if kind != "preference":
        return NO_CONVERSATION
    with suppress(MalformedConversationError):  # no conversation either: then the missing pair is the reason
        if _read_shape(record) is not None:
            return f"{NO_PAIR}: kind: chat reads conversations"
    return NO_PAIR


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    if not isinstance(system, str) or any(message.get("role") == "system" for message in messages[:1]):
        return messages
    return [{"role": "system", "content": system}, *messages]


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


def _read_pair(record: Mapping[str, Any]) -> _Shape | None:
    """The prompt is beside the answers, or both conversations begin with it."""
    outputs = record.get("output")
    for names in PAIR_FIELDS:
        if all(name in record for name in names):
            answers = [record[name] for name in names]
            break
    else:
        if not (isinstance(outputs, list) and len(outputs) == 2 and "instruction" in record):
            return None
        names, answers = ("output", "output"), outputs
    if all(isinstance(answer, str) and _HH_TURN.match(answer) for answer in answers):
        chosen, rejected = map(_read_hh, answers)
        return _Shape(chosen, names, rejected=rejected)
    chosen, rejected = map(_read_answer_messages, answers)
    if any(message.get("role") != "assistant" for message in chosen[:1]):
        return _Shape(chosen, (*names, *PROMPT_FIELDS), rejected=rejected)
    prompt, used = _read_prompt(record)
    return _Shape([*prompt, *chosen], (*names, *used), rejected=[*prompt, *rejected])


def _read_answer(record: Mapping[str, Any]) -> _Shape | None:
    """A prompt and one answer to it, in fields of their own."""
    name = next((name for name in ANSWER_FIELDS if name in record), None)
    if name is None:
        return None
    prompt, used = _read_prompt(record)
    return _Shape([*prompt, *_read_answer_messages(record[name])], (name, *used))


def _read_prompt(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The messages before an answer, and their fields."""
    for name in (*PROMPT_FIELDS, *MESSAGE_FIELDS):
        if isinstance(record.get(name), list):
            return _read_messages(record[name]), (name,)
        if isinstance(record.get(name), str):
            return [*_read_history(record.get("history")), {"role": "user", "content": record[name]}], (name, "history")
    if "instruction" in record:
        messages = _read_alpaca({**record, "output": "-"})
        return messages[:-1], ("instruction", "input", "history")
    raise MalformedConversationError("no prompt before the answers")


def _read_answer_messages(answer: Any) -> list[dict[str, Any]]:
    """An answer: text, a message, or a list of them."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return _read_messages(answer if isinstance(answer, list) else [answer])


def _read_hh(text: str) -> list[dict[str, Any]]:
    """A conversation in one text, with ``Human:`` and ``Assistant:`` before each message."""
    _, *parts = _HH_TURN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[name], "content": said} for name, said in zip(parts[::2], parts[1::2], strict=True)]


def _read_label(record: Mapping[str, Any]) -> bool:
    """Also 0 and 1, as tables have it."""
    label = next((record[name] for name in LABEL_FIELDS if name in record), None)
    if isinstance(label, bool) or label in (0, 1):
        return bool(label)
    raise MalformedConversationError("no label")


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
    asked = "\n".join(text for text in question if text.strip())
    return [*_read_history(record.get("history")), *_turn(asked, last.get("output"))]


def _read_history(history: Any) -> list[dict[str, Any]]:
    """Earlier turns, as pairs of a question and its answer."""
    history = history or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise MalformedConversationError("history is not a list of pairs")
    return [message for turn in history for message in _turn(*turn)]


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
