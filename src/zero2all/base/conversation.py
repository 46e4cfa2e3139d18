"""A conversation: the record of chat data, from the files that hold it to the template that renders it.

Its JSON form follows OpenAI and Hugging Face templates: ``messages`` with ``role``, ``content`` and ``tool_calls``, and
``tools``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]
SourceKind = Literal["text", "chat", "preference", "rating"]
"""What a source of a corpus holds: text, conversations, pairs of a chosen and a rejected answer, or answers with a
label."""
ROLES: tuple[Role, ...] = get_args(Role)
MAX_NESTING = 64  # levels of the arguments of a tool call, and of the description of a tool
BROKEN_CALL, BROKEN_TOOLS = "broken tool call", "broken list of tools"


class MalformedConversationError(ValueError):
    """This is not a conversation. The message is one of a few fixed phrases, so that reasons can be counted."""


@dataclass(frozen=True)
class ToolCall:
    """A function that the assistant calls."""

    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)

    def to_json(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ConversationMessage:
    """One turn. Only the assistant has tool calls, and only then may its content be empty."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()

    def to_json(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        return message | ({"tool_calls": [call.to_json() for call in self.tool_calls]} if self.tool_calls else {})


@dataclass(frozen=True)
class Conversation:
    """Messages in their order, at least one of them from the assistant.

    >>> chat = Conversation.from_json({"messages": [{"role": "user", "content": "2+2?"},
    ...                                             {"role": "assistant", "content": "4"}]})
    >>> chat.messages[1]
    ConversationMessage(role='assistant', content='4', tool_calls=())
    """

    messages: tuple[ConversationMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of the functions that the assistant may call, in JSON Schema."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Conversation:
        """Parse and check the JSON form. Blank lines at both ends of a message and empty system messages are removed.

        ``content`` may be a list of text parts; arguments and ``tools`` may be JSON in a string.
        """
        found = value.get("messages")
        if not isinstance(found, list) or not found:
            raise MalformedConversationError("no messages")
        messages = tuple(_parse_message(message) for message in found)
        messages = tuple(message for message in messages if message.role != "system" or message.content)
        if any(not message.content and not message.tool_calls and message.role != "tool" for message in messages):
            raise MalformedConversationError("empty message")
        if not any(message.role == "assistant" for message in messages):
            raise MalformedConversationError("no assistant message")
        return cls(messages, _parse_tools(value.get("tools")))

    def to_json(self) -> dict[str, Any]:
        messages = [message.to_json() for message in self.messages]
        return {"messages": messages} | ({"tools": list(self.tools)} if self.tools else {})

    @property
    def text(self) -> str:
        """What was said, without roles: messages and tool calls, a blank line between them."""
        said = [text for message in self.messages for text in (message.content, *(c.text for c in message.tool_calls))]
        return "\n\n".join(text for text in said if text)

    def map_text(self, change: Callable[[str], str]) -> Conversation:
        """Change every message and every string in the arguments of a tool call."""
        return replace(
            self,
            messages=tuple(
                replace(
                    message,
                    content=change(message.content) if message.content else "",
                    tool_calls=tuple(
                        replace(call, arguments=_map_strings(call.arguments, change)) for call in message.tool_calls
                    ),
                )
                for message in self.messages
            ),
        )


@dataclass(frozen=True)
class ChatExample:
    """A record of chat data: a conversation to learn from, two to compare, or one with a label.

    >>> pair = ChatExample(chosen, rejected)
    >>> pair.conversation.messages[pair.first_learned :]  # the answer; what is before it is the prompt
    """

    conversation: Conversation
    """In a pair, the one with the chosen answer."""
    rejected: Conversation | None = None
    """The same prompt with another answer."""
    desirable: bool | None = None
    """The label of the answer."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any], kind: SourceKind) -> ChatExample:
        """Parse and check the JSON form: a conversation, with the messages of the other as ``rejected``, or a
        ``label``."""
        conversation = Conversation.from_json(value)
        if kind == "preference":
            rejected = Conversation.from_json({"messages": value.get("rejected"), "tools": value.get("tools")})
            if rejected.messages == conversation.messages:
                raise MalformedConversationError("chosen and rejected are equal")
            return cls(conversation, rejected)
        if kind == "rating":
            label = value.get("label")
            if not isinstance(label, bool):
                raise MalformedConversationError("no label")
            return cls(conversation, desirable=label)
        return cls(conversation)

    def to_json(self) -> dict[str, Any]:
        pair = {} if self.rejected is None else {"rejected": self.rejected.to_json()["messages"]}
        label = {} if self.desirable is None else {"label": self.desirable}
        return self.conversation.to_json() | pair | label

    @property
    def first_learned(self) -> int:
        """The first message that is no prompt: after those that both of a pair have, and after the last question of an
        answer with a label. A conversation alone is learned from its first answer on."""
        messages = self.conversation.messages
        if self.rejected is not None:
            others = self.rejected.messages
            shared = (one == other for one, other in zip(messages[:-1], others[:-1], strict=False))
            return sum(1 for _ in takewhile(bool, shared))
        if self.desirable is None:
            return 0
        return 1 + max((n for n, message in enumerate(messages) if message.role != "assistant"), default=-1)

    @property
    def text(self) -> str:
        """What was said; of a pair, the prompt once."""
        if self.rejected is None:
            return self.conversation.text
        answer = replace(self.rejected, messages=self.rejected.messages[self.first_learned :])
        return f"{self.conversation.text}\n\n{answer.text}"

    def map_text(self, change: Callable[[str], str]) -> ChatExample:
        """Change every message, as ``Conversation.map_text`` does."""
        rejected = None if self.rejected is None else self.rejected.map_text(change)
        return replace(self, conversation=self.conversation.map_text(change), rejected=rejected)


def parse_nested_json(value: Any, reason: str) -> Any:
    """JSON that may be in a string, as others write it. Raises an error with the reason if it is broken or too deep."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise MalformedConversationError(reason) from error
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise MalformedConversationError(reason)


def _parse_message(message: Any) -> ConversationMessage:
    if not isinstance(message, dict):
        raise MalformedConversationError("message is not an object")
    role = next((known for known in ROLES if known == message.get("role")), None)
    if role is None:
        raise MalformedConversationError("unknown role")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or (calls and role != "assistant"):
        raise MalformedConversationError(BROKEN_CALL)
    return ConversationMessage(role, _parse_content(message.get("content")), tuple(_parse_call(call) for call in calls))


def _parse_content(content: Any) -> str:
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    texts = [_part_text(part) for part in parts]
    text = "".join(texts).rstrip()
    indented_from = len(text) - len(text.lstrip())
    return text[text.rfind("\n", 0, indented_from) + 1 :]


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        part = part.get("text") or part.get("value")  # the latter in files of LLaMA-Factory
    if not isinstance(part, str):
        raise MalformedConversationError("content is not text")
    return part


def _parse_call(call: Any) -> ToolCall:
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        raise MalformedConversationError(BROKEN_CALL)
    arguments = parse_nested_json(function.get("arguments") or {}, BROKEN_CALL)
    if not isinstance(arguments, dict):
        raise MalformedConversationError(BROKEN_CALL)
    return ToolCall(name, arguments)


def _parse_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    parsed = parse_nested_json(tools or [], BROKEN_TOOLS)
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise MalformedConversationError(BROKEN_TOOLS)
    return tuple(parsed)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value) if value else value
    if isinstance(value, dict):
        return {name: _map_strings(inner, change) for name, inner in value.items()}
    return [_map_strings(inner, change) for inner in value] if isinstance(value, list) else value
