"""The checker accepts what the generator writes, and finds what is wrong in anything else."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.storyworld import check_story, generate_stories, summarize_checks
from zero2all.storyworld.check import _Checker
from zero2all.storyworld.generate import get_language
from zero2all.storyworld.language import complete_sentences
from zero2all.storyworld.plots import cast
from zero2all.storyworld.teller import Teller

LANGUAGES = ("en", "zh")
ENGLISH = (
    "One sunny morning, Mia was singing in the park. She had a red kite and took it everywhere. Then she went to the "
    "lake. But she put the kite down somewhere and forgot where. Just then, Tom came along. "
    '"I have lost my kite," said Mia to Tom. "Let us look for it together," said Tom to Mia. By the lake, Tom found '
    'the kite behind a rock. He gave the kite back to Mia. "Thank you, Tom!" said Mia. "You are a true friend." '
    "Mia had three apples, and Tom had four, so together they had seven apples. She already had five pears in her bag. "
    "Tom opened his bag and gave Mia six pears. Now Mia had eleven pears. That night, she dreamed of the sea."
)
CHINESE = (
    "一个晴朗的早晨，小梅在公园里唱歌。她有一只红风筝，是奶奶送的。小梅来到了湖边。小梅随手一放，就忘了风筝放在哪儿了。"
    "这时，小刚走了过来。“我的风筝丢了。”小梅对小刚说。“咱们一起找吧！”小刚拉起小梅的手。"
    "在湖边，小刚终于找到了风筝，原来它掉在草丛里。他把风筝还给了小梅。“谢谢你，小刚！”小梅说。"
    "小梅带了三个苹果，小刚带了四个，一共是七个。小梅原来就有五个梨。为了表示感谢，小刚送给小梅六个梨。"
    "这下小梅有十一个梨了。傍晚，小梅和小刚约好明天再来下棋，就回家去了。"
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(language=st.sampled_from(LANGUAGES), seed=st.integers(0, 2**63), plot=st.integers(0, 100))
def test_every_generated_story_is_understood_as_it_was_meant(language: str, seed: int, plot: int) -> None:
    grammar = get_language(language)
    teller = Teller(grammar, f"test/{seed}")
    cast(teller)
    grammar.plots[plot % len(grammar.plots)](teller)
    checker = _Checker(grammar)
    sentences = complete_sentences(teller.text() + "\n")
    assert sentences == teller.sentences
    for sentence in sentences:
        checker.read(sentence)
    assert checker.unparsed == []
    assert checker.problems == []
    assert checker.world.people == teller.world.people
    assert checker.world.things == teller.world.things
    assert checker.world.counts == teller.world.counts
    assert checker.world.sums == checker.world.right_sums == teller.world.sums


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_checker_accepts_all_of_the_generators_output(language: str) -> None:
    quality = summarize_checks(check_story(story, language) for story in generate_stories(language, 11, 200))
    assert (quality.stories, quality.parsed_share) == (200, 1)
    assert quality.consistent_share == quality.right_sum_share == 1
    assert quality.sums > 100


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_story_that_is_cut_off_is_right_up_to_there(language: str) -> None:
    for story in generate_stories(language, 5, 2):
        for end in range(len(story)):
            check = check_story(story[:end], language)
            assert (check.unparsed, check.problems) == ((), ()), story[:end]


@pytest.mark.parametrize(("text", "language"), [(ENGLISH, "en"), (CHINESE, "zh")])
def test_the_story_of_the_following_tests_is_right(text: str, language: str) -> None:
    check = check_story(text, language)
    assert check.unparsed == check.problems == ()
    assert check.consistent
    assert (check.sums, check.right_sums) == (2, 2)


ASLEEP = "fell asleep with a smile. When the sun went down, she went home with a light heart."
CONTRADICTIONS = {
    ENGLISH: [
        ("He gave the kite", "Ben gave the kite", "name"),
        ("Just then, Tom came along. ", "", "name"),
        ("That night, she", "That night, he", "name"),
        ("Just then, Tom came along. ", "Just then, Tom came along. Just then, Tom came along. ", "name"),
        ("He gave the kite", "He gave the drum", "thing"),
        ("By the lake, Tom found the kite behind a rock. ", "", "thing"),
        ("But she put the kite down somewhere and forgot where. ", "", "thing"),
        ('"I have lost my kite," said Mia to Tom.', '"I cannot find my blue kite anywhere, Tom!" said Mia.', "thing"),
        ("By the lake, Tom", "By the river, Tom", "place"),
        ("Then she went to the lake.", "Then she went to the park.", "place"),
        ("Then she went", "Evening came, and Mia was all alone by the river. Then she went", "place"),
        ("came along. ", 'came along. Mia smiled from ear to ear. "What is wrong, Mia?" asked Tom. ', "feeling"),
        ("She had a red", "She was small but very kind. She was small but very brave. She had a red", "trait"),
        ("She already had five", "She already had nine pears in her bag. She already had five", "count"),
        ("That night, she", f"That night, she {ASLEEP} That night, she", "time"),
        ("Just then, Tom came along. ", "Just then, Tom came along. Then Tom went to the hill. ", "place"),
    ],
    CHINESE: [
        ("他把风筝还给了小梅", "冬冬把风筝还给了小梅", "name"),
        ("这时，小刚走了过来。", "", "name"),
        ("她有一只红风筝", "他有一只红风筝", "name"),
        ("他把风筝还给了小梅", "他把灯笼还给了小梅", "thing"),
        ("在湖边，小刚终于找到了风筝，原来它掉在草丛里。", "", "thing"),
        ("“我的风筝丢了。”小梅对小刚说。", "小梅告诉小刚，自己的蓝风筝不见了。", "thing"),
        ("在湖边，小刚", "在河边，小刚", "place"),
        ("小梅来到了湖边", "小梅来到了公园里", "place"),
        ("“咱们一起找吧！”", "小梅脸上笑开了花。“小梅，你怎么了？”小刚问。“咱们一起找吧！”", "feeling"),
        ("她有一只红风筝", "她从小就很勇敢。她从小就很细心。她有一只红风筝", "trait"),
        ("小梅原来就有五个梨", "小梅原来就有九个梨。小梅原来就有五个梨", "count"),
        ("傍晚，小梅和", "夜里，小梅做了一个梦，梦见了星星。傍晚，小梅和", "time"),
    ],
}


@pytest.mark.parametrize(
    ("text", "old", "new", "kind"), [(text, *change) for text, changes in CONTRADICTIONS.items() for change in changes]
)
def test_a_contradiction_is_found(text: str, old: str, new: str, kind: str) -> None:
    check = check_story(text.replace(old, new), "en" if text == ENGLISH else "zh")
    assert check.unparsed == ()
    assert check.problems[0].kind.value == kind
    assert not check.consistent


@pytest.mark.parametrize(
    ("text", "language", "old", "new"),
    [
        (ENGLISH, "en", "had seven apples", "had eight apples"),
        (ENGLISH, "en", "had eleven pears", "had twelve pears"),
        (ENGLISH, "en", "Tom had four", "Tom had five"),
        (CHINESE, "zh", "一共是七个", "一共是八个"),
        (CHINESE, "zh", "有十一个梨", "有十个梨"),
        (CHINESE, "zh", "小刚送给小梅六个梨", "小刚送给小梅七个梨"),
    ],
)
def test_a_wrong_sum_is_counted_and_is_no_contradiction(text: str, language: str, old: str, new: str) -> None:
    check = check_story(text.replace(old, new), language)
    assert (check.sums, check.right_sums) == (2, 1)
    assert check.consistent


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Mia had a red kite.", "en"),  # no such pattern
        ("One sunny morning, Mia was singing in the parks.", "en"),
        ("One sunny morning, mia was singing in the park.", "en"),
        ("One sunny  morning, Mia was singing in the park.", "en"),
        ("One sunny morning, Bob was singing in the park.", "en"),
        ("Mia had an red kite and took it everywhere.", "en"),
        ("One morning, Mia put on his boots and went to the park.", "en"),
        ("Mia had three apples, and Tom had four, so together they had seven pears.", "en"),
        ("Mia gave the kite back to Mia.", "en"),
        ("小梅在公园里一个晴朗的早晨唱歌。", "zh"),
        ("小梅有一把红风筝，是奶奶送的。", "zh"),
        ("小梅带了三个苹果，小刚带了四颗，一共是七个。", "zh"),
        ("小梅带了二个苹果，小刚带了四个，一共是六个。", "zh"),
        ("小梅把风筝还给了小梅。", "zh"),
    ],
)
def test_a_sentence_that_is_not_in_the_language_does_not_parse(text: str, language: str) -> None:
    assert (check_story(text, language).sentences, check_story(text, language).parsed) == (1, 0)


@pytest.mark.parametrize("language", LANGUAGES)
def test_scrambled_words_do_not_parse(language: str) -> None:
    rng = random.Random(0)
    parsed = total = 0
    separator = {"en": " ", "zh": ""}[language]
    for story in generate_stories(language, 2, 25):
        for sentence in complete_sentences(story):
            words = sentence[:-1].split(" ") if language == "en" else list(sentence[:-1])
            rng.shuffle(words)
            parsed += check_story(separator.join(words) + sentence[-1], language).parsed
            total += 1
    assert total > 200
    assert parsed <= 0.01 * total


@pytest.mark.parametrize(
    ("text", "language"), [(ENGLISH, "zh"), (CHINESE, "en"), ("", "en"), ("", "zh"), (" \n", "en")]
)
def test_text_in_another_language_and_no_text_are_not_consistent(text: str, language: str) -> None:
    check = check_story(text, language)
    assert check.parsed == 0
    assert check.sentences == (0 if not text.strip() else check.sentences)
    assert not check.consistent


def test_a_text_that_hardly_parses_is_not_consistent() -> None:
    beginning = ENGLISH.partition("Then she")[0]
    assert check_story(beginning + "It was so.", "en").consistent
    assert not check_story(beginning + "It was so. " * 3, "en").consistent


def test_what_an_unreadable_sentence_mentions_is_unknown_afterwards() -> None:
    unreadable = ENGLISH.replace("By the lake, Tom found the kite behind a rock.", "Tom he did found the kite.")
    check = check_story(unreadable, "en")
    assert (len(check.unparsed), check.problems) == (1, ())
    drifted = ENGLISH.replace("By the lake, Tom found the kite behind a rock.", "Sam he did found the kite.")
    assert check_story(drifted, "en").problems[0].kind.value == "name"


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    "unit", ['"', "“", ".", "Mia ", "a", "小梅", "Mia had three ", "\x00\ud800", ENGLISH, CHINESE, '" " ', "。！”"]
)
def test_ten_megabytes_of_anything_are_checked_at_once(unit: str, language: str) -> None:
    text = unit * (10_000_000 // len(unit))
    start = time.process_time()
    check = check_story(text, language)
    assert time.process_time() - start < 5
    assert check.parsed <= check.sentences <= 5000


def test_a_summary_adds_up() -> None:
    checks = [
        check_story(ENGLISH, "en"),
        check_story(ENGLISH.replace("seven", "nine").replace("He gave the kite", "Ben gave the kite"), "en"),
        check_story("No sense. At all.", "en"),
    ]
    quality = summarize_checks(checks)
    total = 2 * checks[0].sentences + 2
    assert (quality.stories, quality.sentences, quality.sums) == (3, total, 4)
    assert quality.parsed_share == (total - 2) / total
    assert quality.consistent_share == 1 / 3
    assert quality.right_sum_share == 3 / 4
    empty = summarize_checks([])
    assert (empty.parsed_share, empty.consistent_share, empty.right_sum_share) == (None, None, None)
