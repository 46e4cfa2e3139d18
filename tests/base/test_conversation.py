from __future__ import annotations

import json
from typing import Any

import pytest

from zero2all.base.conversation import Conversation, ConversationMessage, MalformedConversationError, ToolCall

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}


def call(name: Any = "f", arguments: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def test_a_conversation_survives_json_with_the_order_of_its_keys() -> None:
    tools = [{"name": "f", "description": "z before a", "arguments": {}}]
    asked = {"messages": [{"role": "system", "content": " \n"}, USER, call(arguments='{"z": "1", "a": [2]}'),
                          {"role": "tool", "content": ""}, REPLY], "tools": json.dumps(tools)}  # fmt: skip
    chat = Conversation.from_json(asked)
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1] == ConversationMessage("assistant", "", (ToolCall("f", {"z": "1", "a": [2]}),))
    again = Conversation.from_json(json.loads(json.dumps(chat.to_json())))
    assert again == chat
    assert json.dumps(again.to_json()).index('"z"') < json.dumps(again.to_json()).index('"a"')
    assert chat.text == 'hi\n\n{"name": "f", "arguments": {"z": "1", "a": [2]}}\n\nhello'
    assert list(chat.tools) == tools


def test_blank_lines_at_both_ends_of_a_message_are_removed_but_not_its_indentation() -> None:
    chat = Conversation.from_json({"messages": [USER, {"role": "assistant", "content": "\n \n    return 1\n\nend \n"}]})
    assert chat.messages[1].content == "    return 1\n\nend"


def test_text_is_changed_in_messages_and_in_the_arguments_of_calls() -> None:
    chat = Conversation.from_json({"messages": [USER, call(arguments={"to": ["hi", 5]})]})
    assert chat.map_text(str.upper).text == 'HI\n\n{"name": "f", "arguments": {"to": ["HI", 5]}}'


PARTS = [["h", "i"], [{"type": "text", "text": "h"}, {"type": "text", "value": "i"}]]


@pytest.mark.parametrize("content", PARTS)
def test_text_parts_are_joined(content: Any) -> None:
    assert Conversation.from_json({"messages": [REPLY, {**USER, "content": content}]}).messages[1].content == "hi"


DEEP = "[" * 100_000
MALFORMED = [
    ("no messages", None), ("no messages", []), ("no messages", "hi"), ("no messages", {"role": "user"}),
    ("no assistant message", [USER]), ("message is not an object", [USER, "hello"]),
    ("unknown role", [USER, {"role": "narrator", "content": "x"}]), ("unknown role", [{"content": "x"}]),
    ("unknown role", [{"role": ["user"], "content": "x"}]), ("content is not text", [USER, {**REPLY, "content": 5}]),
    ("content is not text", [USER, {**REPLY, "content": [{"type": "image_url"}]}]),
    ("empty message", [{**USER, "content": " \n"}, REPLY]), ("empty message", [USER, {**REPLY, "content": None}]),
    ("broken tool call", [USER, call(arguments="{")]), ("broken tool call", [USER, call(arguments=DEEP)]),
    ("broken tool call", [USER, call(arguments='{"a": ' + "[" * 90 + "]" * 90 + "}")]),
    ("broken tool call", [USER, call(arguments=[1])]), ("broken tool call", [USER, call(name="")]),
    ("broken tool call", [USER, {**REPLY, "tool_calls": "f()"}]),
    ("broken tool call", [USER, {**REPLY, "tool_calls": [1]}]),
    ("broken tool call", [{**call(), "role": "user"}, REPLY]),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "messages"), MALFORMED)
def test_what_is_not_a_conversation_is_refused_with_a_fixed_reason(reason: str, messages: Any) -> None:
    with pytest.raises(MalformedConversationError) as error:
        Conversation.from_json({"messages": messages})
    assert str(error.value) == reason


@pytest.mark.parametrize("tools", ["no json", {"a": 1}, ["f"], DEEP])
def test_a_broken_list_of_tools_is_refused(tools: Any) -> None:
    with pytest.raises(MalformedConversationError, match="broken list of tools"):
        Conversation.from_json({"messages": [USER, REPLY], "tools": tools})
