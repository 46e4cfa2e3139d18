"""Conversations about stories: the same everywhere, right by their own check, and with references in the language."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from zero2all.base.conversation import Conversation
from zero2all.generation.story_quality import HELD_OUT_FROM, StoryAnswer, held_out_conversations
from zero2all.storyworld import LANGUAGES, check_story, story_language
from zero2all.storyworld.conversations import (
    KIND_SHARES,
    StoryConversation,
    generate_conversation,
    generate_conversations,
    handwritten_conversations,
)


@pytest.fixture(scope="module", params=LANGUAGES)
def conversations(request: pytest.FixtureRequest) -> list[StoryConversation]:
    return list(generate_conversations(request.param, seed=3, count=300))


def test_a_conversation_depends_on_its_number_alone() -> None:
    for language in LANGUAGES:
        assert generate_conversation(language, 3, 17) == generate_conversation(language, 3, 17)
        assert generate_conversation(language, 3, 17) != generate_conversation(language, 4, 17)


def test_every_kind_is_there_and_every_reference_passes_its_own_check(conversations: list[StoryConversation]) -> None:
    kinds = Counter(one.kind for one in conversations)
    assert set(kinds) == set(KIND_SHARES)
    checkable = [one for one in conversations if one.expected is not None]
    assert len(checkable) > 0.7 * len(conversations)
    assert all(one.is_right(one.reference) for one in checkable)
    assert all(one.is_right("") is False and one.is_right("I do not know.") is False for one in checkable)
    for one in conversations:
        Conversation.from_json({"messages": one.messages})
        assert [message["role"] for message in one.messages] == ["user", "assistant"] * (len(one.messages) // 2)


def test_the_stories_in_conversations_are_stories(conversations: list[StoryConversation]) -> None:
    told = [one.reference for one in conversations if one.kind == "story"]
    assert len(told) > 10
    for text in told:
        check = check_story(text, story_language(text))
        assert check.consistent
        assert not check.unparsed


def test_a_number_inside_another_is_not_the_answer() -> None:
    one = StoryConversation("sum", [], "8")
    assert one.is_right("5 + 3 = 8")
    assert one.is_right("等于8。")
    assert not one.is_right("18")
    assert not one.is_right("80")


def test_json_must_be_equal_not_similar() -> None:
    one = StoryConversation("format", [], json.dumps({"name": "Ben", "place": "park"}))
    assert one.is_right('{"place": "park", "name": "Ben"}')
    for wrong in ('{"name": "Ben"}', "Ben, park", '{"name": "Ben", "place": "park"} Bye', "[" * 5000):
        assert not one.is_right(wrong)


@pytest.mark.parametrize("language", LANGUAGES)
def test_at_least_a_hundred_conversations_are_written_by_hand(language: str) -> None:
    found = handwritten_conversations(language)
    assert len(found) >= 100
    questions = [one.messages[0]["content"] for one in found]
    assert len(set(questions)) == len(questions)
    for one in found:
        Conversation.from_json({"messages": one.messages})
        assert len(one.messages) >= 2
        assert story_language(one.messages[0]["content"] + one.reference) == language


def test_held_out_conversations_are_never_trained_on() -> None:
    held_out = held_out_conversations(3, 20)
    assert len(held_out) == 40
    trained = {str(one.messages) for one in generate_conversations("en", 3, 500)}
    questions = [one for one in held_out if one.kind == "question"]
    assert not any(str(one.messages) in trained for one in questions)
    assert HELD_OUT_FROM > 100_000


def test_a_user_turn_in_an_answer_is_seen() -> None:
    one = StoryConversation("sum", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert StoryAnswer(one, "yes\nuser\nno", True, None).has_user_turn
    assert not StoryAnswer(one, "the user is here", True, None).has_user_turn
