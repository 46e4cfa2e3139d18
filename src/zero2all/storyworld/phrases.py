"""What is asked and answered in conversations about stories, in each language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Fact = tuple[tuple[str, ...], tuple[str, ...], str]
"""Questions, answers, and the word that an answer must have."""


@dataclass(frozen=True)
class Phrases:
    """Templates; ``{a}`` is the hero of a story."""

    facts: Mapping[str, Fact]
    sums: tuple[tuple[str, str], ...]
    differences: tuple[tuple[str, str], ...]
    result: str
    """What the answer to a sum must have."""
    story_requests: tuple[str, ...]
    json_requests: tuple[str, ...]
    one_word: tuple[str, ...]
    list_requests: tuple[str, ...]
    lists: tuple[tuple[str, str], ...]
    """Tag of the items, and their name."""
    comma: str
    unknown: tuple[str, ...]
    refusals: tuple[str, ...]
    greetings: tuple[tuple[str, str], ...]


ENGLISH = Phrases(
    facts={
        "who": (
            ("Who is the story about?", "Who is the hero of this story?", "Whose story is this?"),
            ("The story is about {a}.", "It is a story about {a}."),
            "{a}",
        ),
        "where": (
            ("Where was {a} first?", "Where does the story begin?", "Where did {a} go first?"),
            ("{a} was {at}.", "It begins {at}."),
            "{place}",
        ),
        "friend": (
            ("Who else is in the story?", "Whom did {a} meet?", "Who is the other one in the story?"),
            ("{a} met {b}.", "The other one is {b}."),
            "{b}",
        ),
        "thing": (
            ("Which thing is the story about?", "What thing do they talk about?"),
            ("It is about {one}.", "The story is about {one}."),
            "{thing}",
        ),
        "many": (
            ("How many {item} does {a} have in the end?", "How many {item} are left for {a}?"),
            ("{a} has {n} {item}.", "In the end {a} has {n} {item}."),
            "{n}",
        ),
    },
    sums=(
        ("What is {n} plus {m}?", "{N} plus {m} is {k}."),
        ("How much is {n} plus {m}?", "{N} plus {m} is {k}."),
        ("Add {n} and {m}.", "The sum is {k}."),
    ),
    differences=(
        ("What is {n} minus {m}?", "{N} minus {m} is {k}."),
        ("How much is {n} minus {m}?", "{N} minus {m} is {k}."),
        ("Take {m} away from {n}.", "That leaves {k}."),
    ),
    result="{k}.",
    story_requests=(
        "Tell me a story about {a}.",
        "Please write a short story about {a}.",
        "I would like to hear a story about {a}.",
    ),
    json_requests=(
        'Give the hero and the first place as JSON with the keys "name" and "place".',
        'Answer in JSON only, with "name" for the hero and "place" for where it begins.',
    ),
    one_word=("Answer in one word: {question}", "{question} Use one word only."),
    list_requests=("Name {n} {name}, separated by commas.", "Give me a list of {n} {name}, with commas between them."),
    lists=(("fruit", "fruits"), ("wild", "things that one can find in a forest"), ("food", "things to eat")),
    comma=", ",
    unknown=(
        "What is the capital of France?",
        "Who won the game last night?",
        "Can you book a train for me?",
        "What is the weather tomorrow?",
        "Translate this page into German.",
        "How do I fix my car?",
        "What is the price of gold today?",
        "Can you show me a picture of a cat?",
        "Who is the president?",
        "Write a program that sorts a list.",
        "What should I do about my headache?",
        "How far away is the moon?",
        "Please call my mother.",
        "What is my password?",
        "Which phone should I buy?",
    ),
    refusals=(
        "I am sorry, I do not know that. I only know short stories and small sums.",
        "Sorry, I cannot help with that. Ask me about a story or a small sum.",
        "I am sorry, that is not something I have learned. I can tell you a story instead.",
    ),
    greetings=(
        ("Hello!", "Hello! Shall I tell you a story?"),
        ("Hi, who are you?", "I am a small model that has read many short stories."),
        ("Who are you?", "I am a small model that has read many short stories."),
        ("What can you do?", "I can tell stories, answer questions about them and do small sums."),
        ("Thank you!", "You are welcome!"),
        ("Goodbye!", "Goodbye! Come back for another story."),
        ("Good morning!", "Good morning! What would you like to hear?"),
        ("Can you help me?", "I can try. I know short stories and small sums."),
    ),
)

CHINESE = Phrases(
    facts={
        "who": (
            ("这个故事讲的是谁？", "故事的主人公是谁？", "这是谁的故事？"),
            ("这个故事讲的是{a}。", "故事的主人公是{a}。"),
            "{a}",
        ),
        "where": (
            ("{a}先去了哪里？", "故事是在哪里开始的？", "{a}一开始在哪里？"),
            ("{a}一开始在{at}。", "故事是在{at}开始的。"),
            "{at}",
        ),
        "friend": (
            ("故事里还有谁？", "{a}遇见了谁？", "故事里的另一个是谁？"),
            ("{a}遇见了{b}。", "故事里还有{b}。"),
            "{b}",
        ),
        "thing": (
            ("故事里提到了什么东西？", "这个故事和什么东西有关？"),
            ("故事里提到了{one}。", "这个故事和{one}有关。"),
            "{thing}",
        ),
        "many": (
            ("最后{a}有多少{item}？", "{a}最后有几{m}{item}？"),
            ("{a}有{n}{m}{item}。", "最后{a}有{n}{m}{item}。"),
            "{n}{m}",
        ),
    },
    sums=(
        ("{n}加{m}等于几？", "{n}加{m}等于{k}。"),
        ("{n}加{m}是多少？", "{n}加{m}等于{k}。"),
        ("把{n}和{m}加起来。", "一共是{k}。"),
    ),
    differences=(
        ("{n}减{m}等于几？", "{n}减{m}等于{k}。"),
        ("{n}减{m}是多少？", "{n}减{m}等于{k}。"),
        ("从{n}里去掉{m}。", "还剩{k}。"),
    ),
    result="{k}。",
    story_requests=("给我讲一个{a}的故事。", "请写一个关于{a}的小故事。", "我想听{a}的故事。"),
    json_requests=(
        '用 JSON 回答，"name" 是主人公，"place" 是故事开始的地方。',
        '请只输出 JSON，键是 "name"（主人公）和 "place"（最初的地点）。',
    ),
    one_word=("只用一个词回答：{question}", "{question}只回答一个词。"),
    list_requests=("说出{n}种{name}，用顿号隔开。", "列出{n}种{name}，中间用顿号。"),
    lists=(("fruit", "水果"), ("wild", "树林里能找到的东西"), ("food", "吃的东西")),
    comma="、",
    unknown=(
        "法国的首都是哪里？",
        "昨天的比赛谁赢了？",
        "帮我订一张火车票。",
        "明天天气怎么样？",
        "把这一页翻译成英文。",
        "我的车坏了，怎么修？",
        "今天的金价是多少？",
        "给我看一张猫的照片。",
        "现在的总统是谁？",
        "写一个排序的程序。",
        "我头疼怎么办？",
        "月亮离我们有多远？",
        "请给我妈妈打个电话。",
        "我的密码是什么？",
        "我应该买哪种手机？",
    ),
    refusals=(
        "对不起，这个我不知道。我只会讲小故事和做简单的算术。",
        "抱歉，这件事我帮不上忙。你可以问我故事里的事，或者让我做简单的算术。",
        "对不起，这个我没有学过。我可以给你讲个故事。",
    ),
    greetings=(
        ("你好！", "你好！要听故事吗？"),
        ("你是谁？", "我是一个读过很多小故事的小模型。"),
        ("你好，你叫什么名字？", "我是一个读过很多小故事的小模型。"),
        ("你会做什么？", "我会讲故事，回答故事里的问题，还会做简单的算术。"),
        ("谢谢你！", "不客气！"),
        ("再见！", "再见！欢迎再来听故事。"),
        ("早上好！", "早上好！你想听什么？"),
        ("你能帮我吗？", "我可以试试。我知道一些小故事，也会简单的算术。"),
    ),
)

PHRASES: Mapping[str, Phrases] = {"en": ENGLISH, "zh": CHINESE}
