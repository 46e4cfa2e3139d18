"""Each filter on three documents that it drops or changes and three near misses that it keeps."""

from __future__ import annotations

import json
import pickle
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero2all.base.errors import UsageError
from zero2all.base.plugins import builtin, builtin_names
from zero2all.corpus.document import Document
from zero2all.corpus.filters import (
    DEFAULT_FILTERS,
    Change,
    Drop,
    Keep,
    apply_filters,
    build_filters,
    classify_text,
)
from zero2all.corpus.filters.quality_classifier import load_quality_model, train_quality_model
from zero2all.corpus.filters.text_kinds import split_listings, strip_html_comments

ZH = (
    "春天的山谷里，溪水沿着石阶流下来，两岸开满了野花。老人坐在门前，给孩子们讲起从前的故事。\n"
    "他说那一年大旱，村里的人翻过三座山去找水，走了七天七夜，终于在悬崖底下听见了泉声。\n"
    "后来人们在那里修了一座小庙，每到清明，远近的人都会带着酒和果子来看一看。\n"
)
EN = (
    "The river had been rising since noon, and by evening the lower fields were gone. My father walked to the gate\n"
    "with a lantern and counted the sheep that had come up to the wall. There were nine of them, and there ought to\n"
    "have been thirty. He said nothing about it. We carried the chairs upstairs and waited for the rain to stop.\n"
    "It stopped before dawn. When we looked out, the whole valley was a lake, and the church stood in it to its knee.\n"
    "Nobody in the village could remember such a flood, though every family had a story about an older one.\n"
)
CODE = (
    "import os\n\n\ndef walk(top):\n\tfor name in os.listdir(top):  \n\t\tif os.path.isdir(name):\n"
    "\t\t\tyield from walk(name)\n\t\telse:\n\t\t\tyield name\n\n\n\n\n\n\nclass Empty:\n    pass\n"
)
VERSE = "床前明月光，疑是地上霜。\n舉頭望明月，低頭思故鄉。"


def doc(content: str, **fields: str) -> Document:
    known = {"gid": "g", "id": "1", "data_src": "s", "category": "", "title": "", "desc": "", "others": ""}
    return Document(**{**known, **fields, "content": content})


def code(content: str, **fields: str) -> Document:
    return doc(content, **{"title": "pkg/module.py", **fields})


def verdict(name: str, document: Document, **options: Any) -> Any:
    return build_filters([{"name": name, **options}])[0](document)


def dropped(name: str, *documents: Document, **options: Any) -> list[str]:
    """The reasons, one for each document; fails if one of them is not dropped."""
    verdicts = [verdict(name, document, **options) for document in documents]
    assert all(isinstance(one, Drop) for one in verdicts), verdicts
    return [one.reason for one in verdicts]


def drops(name: str, *cases: tuple[str, Document], **options: Any) -> None:
    """Reasons, each with a document that is dropped for it."""
    assert dropped(name, *(document for _, document in cases), **options) == [reason for reason, _ in cases]


def changed(name: str, *documents: Document, **options: Any) -> list[str]:
    verdicts = [verdict(name, document, **options) for document in documents]
    assert all(isinstance(one, Change) for one in verdicts), verdicts
    return [one.content for one in verdicts]


def changes(name: str, *cases: tuple[str, Document], **options: Any) -> None:
    """Texts, each with the document that becomes it."""
    assert changed(name, *(document for _, document in cases), **options) == [text for text, _ in cases]


def kept(name: str, *documents: Document, **options: Any) -> None:
    for document in documents:
        assert verdict(name, document, **options) == Keep(), document.content[:80]


# --- kinds ---------------------------------------------------------------------------------------------------------


def test_kind_of_text() -> None:
    assert classify_text(doc(ZH)) == classify_text(doc(VERSE)) == "zh"
    assert classify_text(doc(EN)) == classify_text(doc("Un café près de la forêt, où l'été était déjà fini.")) == "en"
    assert classify_text(doc("吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。")) == "other"
    assert classify_text(doc("Все счастливые семьи похожи друг на друга.")) == "other"
    assert classify_text(doc("")) == classify_text(doc("12345 !!!")) == "other"
    listing = "```\n" + "for item in collection: print(item)\n" * 40 + "```\n"
    assert classify_text(doc("下面的例子说明怎样遍历一个集合。\n" + listing + "这样就可以了。")) == "zh"


def test_kind_of_code() -> None:
    assert classify_text(doc(CODE)) == "code"  # by its appearance
    assert classify_text(doc("x = 1", title="a/b.py")) == classify_text(doc("x = 1", title="setup.py")) == "code"
    assert classify_text(doc("x = 1", category="code")) == "code"
    assert classify_text(doc("x = 1", others=json.dumps({"path": "src/x.rs"}))) == "code"
    assert classify_text(doc("# 注释\n" * 30, title="注释.py")) == "code"
    assert classify_text(doc(EN, title="Node.js")) == "en"  # an article about a program with such a name
    assert classify_text(doc(EN, title="docs/intro.md", others='{"path": "docs/intro.md"}')) == "en"


# --- text ----------------------------------------------------------------------------------------------------------


def test_normalize_mends_prose() -> None:
    clock = doc("cafe\u0301 is\x07 open  \nuntil\x0cten" + "\n" * 9 + "o'clock")
    changes(
        "normalize",
        ("他说：好。\n第二行\n", doc("他说\u200b：好。\r\n第二\ufeff行\u3000 \r\n")),
        ("café is open\nuntil\nten\n\n\n\no'clock", clock),
        ("cooperation of the\nnine towns", doc("co\u00adop\u200deration of the\rnine towns")),
        ("áb and some more words", doc("a\u200b\u0301b and some more words")),
    )


def test_normalize_keeps_what_is_meant() -> None:
    kept(
        "normalize",
        doc("\u3000\u3000全角，缩进！Ａ１"),
        doc("a\tb\n\n\n\nthree blank lines"),
        doc("می\u200cخواهم کتاب بخوانم"),
    )
    kept("normalize", code(CODE), code("s = 'e\u0301\u200b'  \n\t\n\n\n\n\n\n\n"), code("a = 1\r b\n"))


def test_normalize_changes_only_line_ends_bom_and_nul_in_code() -> None:
    given = code("\ufeffif x:\r\n\ty  \r\n"), code("a\x00b = '\ufeff'\n"), code("a = 1\rb = 2\r")
    assert changed("normalize", *given) == ["if x:\n\ty  \n", "ab = '\ufeff'\n", "a = 1\nb = 2\n"]


def test_strip_gutenberg() -> None:
    title = "Project Gutenberg EBook of X\n\n"
    head = f"The {title}This eBook is free.\n\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n"
    foot = f"\nEnd of the {title}*** END OF THIS PROJECT GUTENBERG EBOOK X ***\nlicence, 50 pages"
    start = "***START OF THE PROJECT GUTENBERG EBOOK 道德經***"
    assert changed(
        "strip_gutenberg",
        doc(head + "\nProduced by A. Volunteer\nand friends\n\n\nCHAPTER I\n\n" + EN + foot),
        doc((head + EN + "*** END OF THE PROJECT GUTENBERG EBOOK X ***").replace("\n", "\r\n")),
        doc(f"Project Gutenberg\n{start}\n道可道，非常道。\n"),
    ) == ["CHAPTER I\n\n" + EN, EN, "道可道，非常道。\n"]
    kept("strip_gutenberg", doc("Project Gutenberg was founded in 1971. It has a START OF a header."))
    kept(
        "strip_gutenberg",
        doc("*** START OF THE RACE ***\n" + EN),
        doc("古登堡计划（Project Gutenberg）由志工参与。" + ZH),
    )


def test_html_comments() -> None:
    fenced = "```\n<!-- taught -->\n```\n"
    changes(
        "html_comments",
        ("译文在这里。\n", doc("<!--\nThe original.\n-->\n译文在这里。\n")),
        ("One three.", doc("One <!-- two --> three.")),
        (f"{fenced}是的，留下。\n", doc(f"{fenced}<!-- gone -->\n是的，留下。\n")),
    )
    kept("html_comments", doc("a <-- b --> c"), code("x = '<!-- a -->'\n"), doc("<!-- never closed, 没有结束"))


def test_language() -> None:
    pytest.importorskip("py3langid")
    french = "La rivière montait depuis midi, et le soir les champs du bas avaient disparu sous les eaux. " * 2
    russian = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. " * 2
    japanese = (
        "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所で泣いていた。" * 3
    )
    drops("language", ("language fr", doc(french)), ("language ru", doc(russian)), ("language ja", doc(japanese)))
    drops("language", ("language zh", doc(ZH)), keep=["en"])
    kept(
        "language",
        doc(EN),
        doc(ZH),
        doc("子曰：學而時習之，不亦說乎？有朋自遠方來，不亦樂乎？" * 4),
        code(f"# {french}\nx = 1\n"),
    )
    kept("language", doc("Bonjour le monde"))  # too short to tell
    kept("language", doc(french), keep=["fr"])
    kept("language", doc(french), min_confidence=1.1)


def test_too_short() -> None:
    short = doc("登录 | 注册"), doc("Click here to read more."), code("x = 1\n"), doc("a b " + " " * 500)
    assert dropped("too_short", *short) == ["too short"] * 4
    kept("too_short", doc("白日依山盡，黃河入海流。"), doc(EN[:110]), code("def f():\n    return {'a': 1}\n"))
    kept("too_short", doc(" " * 2000 + EN))


def test_too_long() -> None:
    limits = {"max_chars": 300, "max_chars_code": 100}
    assert dropped("too_long", doc(ZH * 4), doc(EN), code(CODE), **limits) == ["too long"] * 3
    kept("too_long", doc(ZH), doc(EN[:300]), code(CODE[:100]), **limits)


# --- rules ---------------------------------------------------------------------------------------------------------


def test_gopher_quality_in_english() -> None:
    lines = EN.splitlines()
    drops(
        "gopher_quality",
        ("too few words", doc("The sale ends today, and the shop is closed.")),
        ("word length", doc(" ".join(["the and of a b c d e f g"] * 10))),
        ("word length", doc("the and " + "Donaudampfschifffahrtsgesellschaft " * 60)),
        ("too many hash signs", doc(EN + "#tag " * 60)),
        ("too many bullets", doc("\n".join(f"• {line}" for line in lines))),
        ("too many lines ending in an ellipsis", doc("\n".join(f"{line}..." for line in lines))),
        ("too few words with letters", doc(EN + "123 456 " * 40)),
        ("no stop words", doc("Rain fell on many towns today. " * 12)),
    )
    kept("gopher_quality", doc(EN), doc("\n".join(f"## {line}" for line in lines)), doc(EN + "100 200 " * 8))
    kept("gopher_quality", doc(EN + "\n```\n" + "0x00 0x01 {} = \n" * 100 + "```\n"))
    drops("gopher_quality", ("too many words", doc(EN * 3)), max_words=100)
    kept("gopher_quality", doc(EN * 3), max_words=0)


def test_gopher_quality_in_chinese() -> None:
    drops(
        "gopher_quality",
        ("too few characters", doc("今天天气很好。")),
        ("too few letters", doc(ZH + "编号：" + "00-11-22；33-44-55；" * 12)),
        ("no stop words", doc("登录注册首页新闻体育财经娱乐军事汽车房产科技教育健康旅游" * 10)),
        ("too many ellipses", doc(ZH + "好……" * 30)),
    )
    statute = "第一条　为了规范公司的组织和行为，保护公司、股东和债权人的合法权益，维护社会经济秩序，制定本法。\n"
    kept("gopher_quality", doc(ZH), doc(statute * 3), doc(ZH + "公式 $a_1 + b_2 = c_3$ 成立。" * 20))
    kept("gopher_quality", doc(VERSE), min_chars_zh=10)  # no stop word, but too short to ask for one
    kept("gopher_quality", code(CODE), doc("Все счастливые семьи похожи."))


def test_gopher_repetition() -> None:
    listed = EN + "\n".join(f"{number}. Turn to page {number * 7}." for number in range(8))
    drops(
        "gopher_repetition",
        ("repeated lines", doc("Buy now!\n" * 5 + EN)),
        ("repeated lines", doc("免费领取红包\n" * 5 + ZH)),
        ("repeated paragraphs", doc((ZH + "\n") * 2)),
        ("most frequent 2-gram", doc("cheap watches " * 20 + EN)),
        ("most frequent 3-gram", doc(ZH[:60] + "点我点我点我" * 20)),
        ("repeated 5-grams", doc(" ".join(EN.split()) + " " + " ".join(EN.split()[:40]))),
        ("repeated 8-grams", doc(ZH.replace("\n", "") + ZH[:50])),
    )
    kept("gopher_repetition", doc(EN), doc(ZH), doc(listed), doc(VERSE), code("x = 1\n" * 50))
    kept("gopher_repetition", doc("如夢令\n昨夜雨疏風驟，濃睡不消殘酒。\n知否，知否？應是綠肥紅瘦。"))
    kept("gopher_repetition", doc(EN + "\n```\n" + "echo again and again and again\n" * 30 + "```\n"))


def test_repeated_lines() -> None:
    long_en, long_zh = EN.splitlines()[0], ZH.splitlines()[0]
    assert changed(
        "repeated_lines",
        doc("\n".join([long_en, "a", long_en, "b", long_en, EN])),
        doc("\n".join([long_zh, long_zh, long_zh, ZH])),
    ) == [
        "\n".join([long_en, "a", long_en, "b", EN.split("\n", 1)[1]]),
        "\n".join([long_zh, long_zh, ZH.split("\n", 1)[1]]),
    ]
    assert dropped("repeated_lines", doc(f"{long_en}\n" * 9)) == ["mostly repeated lines"]
    kept(
        "repeated_lines",
        doc(f"{long_en}\n{long_zh}\n" * 2),
        doc("啊，朋友再见！\n" * 9 + ZH),
        code("raise NotImplementedError\n" * 9),
    )
    kept("repeated_lines", code(f"# {long_en}\n" * 9), doc(f"{ZH}```\n" + f"{long_zh}\n" * 3 + "```\n"))


def test_c4_quality() -> None:
    english, chinese = changed(
        "c4_quality",
        doc("Home | About\n" + EN + "\nThis site uses cookies to serve you.\nPlease turn on JavaScript now.\nYes.\n"),
        doc("首页\n" + ZH + "更多内容请见我们的隐私政策。\n好。\n上一篇 下一篇\n"),
    )
    assert english == "\n".join(line for line in EN.splitlines() if line.endswith("."))
    assert chinese == ZH.strip()
    assert changed("c4_quality", doc("He came.[12] " * 6)) == [("He came. " * 6).strip()]
    drops("c4_quality", ("lorem ipsum", doc(EN + "Lorem ipsum dolor.")), ("curly bracket", doc(ZH + "{ }")))
    assert dropped("c4_quality", doc("It is one. It is two."), doc("标题\n只有一句话。")) == ["too few sentences"] * 2
    plain = " ".join(EN.split())
    kept("c4_quality", doc(plain), doc(ZH.strip()), code("function () { return 'javascript' }\n"))


def test_fineweb_quality() -> None:
    menu = "\n".join(f"Chapter number {number} of the long story about floods" for number in range(30))
    columns = "\n".join(f"第{n}个栏目的名称没有任何标点" for n in range(20))
    replies = "\n".join(f"{n}. Why not." for n in range(30))
    drops(
        "fineweb_quality",
        ("too few lines end in punctuation", doc(menu)),
        ("too many short lines", doc("首页\n新闻\n体育\n财经\n关于我们\n联系方式\n" + ZH.splitlines()[0])),
        ("characters in repeated lines", doc(EN + EN.splitlines()[0])),
        ("too many short lines", doc("Yes, it is the one that I had in mind.\nSo do I.\n" + replies)),
        ("too few lines end in punctuation", doc("导航栏目名称之一没有标点\n" + columns)),
    )
    kept("fineweb_quality", doc(EN), doc(ZH), doc(VERSE), code("a\nb\nc\n"), doc(EN.replace("\n", "\n\n")))


# --- privacy -------------------------------------------------------------------------------------------------------


def test_pii_is_masked() -> None:
    english = "Write to jane.doe+spam@mail.corp.co.uk, or call +86 138-0013-8000."
    chinese = "联系人手机13912345678，身份证号11010519491231002X，谢谢。"
    changes(
        "pii",
        ("Write to <email>, or call <phone>.", doc(english)),
        ("联系人手机<phone>，身份证号<id_number>，谢谢。", doc(chinese)),
        ("Card <card> was used from <ip> today.", doc("Card 4111 1111 1111 1111 was used from 93.184.216.34 today.")),
        ("银行卡号<card>，地址在这里。", doc("银行卡号6222021234567890128，地址在这里。")),
    )


def test_pii_near_misses_stay() -> None:
    kept(
        "pii",
        doc("Write to user@example.com or look at @handle, a@b and 3 @ 5."),
        doc("编号110105194912310021不是身份证号，电话12912345678也不是手机。"),
        doc("Order 4111 1111 1111 1112, see section 3.2.1.4, host 192.168.1.20, mask 255.255.255.0, v93.184.216.34."),
        doc("Call +14155550132 about the capture 20080516205901 of 8.8.8.8."),
        doc("圆周率是3.14159265358979，时间戳1700000000000，股价0.13912345678。"),
        code("ADMIN = 'jane@corp.com'  # 93.184.216.34\n"),
    )
    assert changed("pii", code("ADMIN = 'jane@corp.com'\n"), in_code=True) == ["ADMIN = '<email>'\n"]


# Put together here, so that scanners of this repository do not take them for real ones.
KEY = "-----BEGIN RSA " + "PRIVATE KEY-----\n" + "MIIEowIBAAKCAQEA7bq1\n" * 8 + "-----END RSA " + "PRIVATE KEY-----"
GITHUB = "ghp" + "_" + "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xY1zA2"
AWS = "AKIA" + "J4Q7ZP2XN6WM3KRT"


def test_secrets() -> None:
    random_value = "q7Zx" + "Rk29LmVt84PwYd61NcHs"
    keys = doc(f"密钥是 {AWS}，请勿外传。"), doc(f"Use {GITHUB} as the token."), code(f"api_key = '{random_value}'\n")
    assert dropped("secrets", code(f'K = """{KEY}"""\n'), *keys) == ["secret"] * 4
    changes(
        "secrets",
        ('K = """<secret>"""\nx = 1\n', code(f'K = """{KEY}"""\nx = 1\n')),
        ('{"client_secret": "<secret>"}\n', code(f'{{"client_secret": "{random_value}"}}\n')),
        ("a <secret> b", doc(f"a {AWS} b")),
        action="mask",
    )
    kept(
        "secrets",
        code('HEADER = "-----BEGIN RSA ' + 'PRIVATE KEY-----"\n'),
        code("api_key = 'aaaaaaaaaaaaaaaaaaaaaa1'\n"),
        code("api_key = 'your-api-key-goes-here-2024'\n"),
        code("api_key = os.environ['SERVICE_API_KEY_2024_PRODUCTION']\n"),
        code(f"checksum = '{random_value}'\n"),
        doc("AKIA" + "IOSFODNN7EXAMPLE 是文档里的例子。"),
        doc("ghp_" + "short is no token, nor is " + AWS.lower()),
        doc(f"api_key = '{random_value}' appears in prose, where it may be anything."),
    )


# --- code ----------------------------------------------------------------------------------------------------------


def test_code_generated() -> None:
    said = "says that it is generated"
    drops(
        "code_generated",
        (said, code("# Generated by the protocol buffer compiler.  DO NOT EDIT!\nimport x\n")),
        (said, code("// 本文件由 protoc 自动生成，请勿修改\nint x = 1;\n", title="a/b.cc")),
        (said, code("/* eslint-disable */\n// @generated\nvar a=1\n", title="a/b.js")),
        ("long lines on average", code("!function(e){" + "var a=e.b;" * 40 + "}();\n", title="a/b.js")),
        ("a very long line", code("x = 1\n" * 200 + "DATA = '" + "A" * 1500 + "'\n")),
        ("few letters and digits", code("{ [ ( ; : , . } ] )\n" * 30)),
    )
    kept(
        "code_generated",
        code(CODE),
        code('def emit(out):\n    out.write("# Generated by emit. DO NOT EDIT\\n")\n'),
        code("x = 1\n" * 40 + "# this table was generated by hand, long ago\n"),
        code("# 读取由用户写成的配置\nimport os\n"),
        doc("# Generated by nobody\n" + EN),
        doc("一" * 3000),
    )


def test_code_licence() -> None:
    def said(licence: Any, content: str = CODE) -> Document:
        return code(content, others=json.dumps({"license": licence}))

    refused = (
        *(said("GPL-3.0-only"), said(["MIT", "EUPL-1.2"]), said("MIT AND GPL-2.0")),
        code("# SPDX-License-Identifier: LGPL-2.1-or-later\nx = 1\n"),
        code("// This program is distributed under the GNU General Public License.\nint x;\n", title="a/b.c"),
    )
    assert dropped("code_licence", *refused) == ["licence not allowed"] * 5
    assert dropped("code_licence", code(CODE), keep_unknown=False) == ["licence unknown"]
    kept(
        "code_licence",
        said("mit"),
        said("GPL-2.0 OR Apache-2.0"),
        said("Apache-2.0 WITH LLVM-exception"),
        said("BSD 3-Clause License"),
        code("# SPDX-License-Identifier: Apache-2.0\nx = 1\n"),
        code(CODE),  # says nothing
        doc(EN, others='{"license": "GPL-3.0"}'),  # no code
        code(CODE, others="{not json, license"),
    )
    kept("code_licence", said("GPL-3.0"), allowed=["GPL-3.0"])


# --- a classifier --------------------------------------------------------------------------------------------------

BAD = [
    f"免费领取 {n} 元红包!!! 点击 www.spam{n}.cn BUY NOW cheap pills {n} !!! 立即抢购 限时 {n} 折" for n in range(40)
]
GOOD = [f"{line} {number}" for number in range(5) for line in (ZH + EN).splitlines()]


def test_quality_score(tmp_path: Path) -> None:
    about = train_quality_model(GOOD, BAD, tmp_path / "model")
    assert about.held_out_accuracy >= 0.9
    model = str(tmp_path / "model")
    spam = doc("点击领取红包!!! 限时抢购 www.spam.cn"), doc("cheap pills !!! BUY NOW at www.spam7.cn"), doc(BAD[0] * 3)
    assert dropped("quality_score", *spam, model=model) == ["low quality score"] * 3
    assert dropped("quality_score", code(BAD[0]), model=model, in_code=True) == ["low quality score"]
    kept(
        "quality_score",
        doc("老人坐在门前，给孩子们讲故事。"),
        doc("We waited upstairs for the rain to stop."),
        code(BAD[0]),
        model=model,
    )
    kept("quality_score", spam[0], model=model, threshold=0.0)


def test_quality_model_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_quality_model(GOOD, BAD, tmp_path / name, seed=seed)
    files = [(tmp_path / f"{name}.npz").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    scores = [load_quality_model(tmp_path / name).score(BAD[3]) for name in "ab"]
    assert scores[0] == scores[1] < 0.5


def test_quality_mistakes_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least two good"):
        train_quality_model([], BAD, tmp_path / "model")
    with pytest.raises(UsageError, match="no quality model at"):
        verdict("quality_score", doc(EN), model=str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="option model"):
        build_filters(["quality_score"])


# --- the list ------------------------------------------------------------------------------------------------------


def test_a_wrong_name_or_option_gets_the_nearest_right_one() -> None:
    with pytest.raises(UsageError, match="no filter 'gopher_qualty'; did you mean 'gopher_quality'"):
        build_filters([{"name": "gopher_qualty"}])
    with pytest.raises(UsageError, match="too_short has no option 'min_char'; did you mean 'min_chars'"):
        build_filters([{"name": "too_short", "min_char": 3}])
    with pytest.raises(UsageError, match=r"too_short, option min_chars: .*integer"):
        build_filters([{"name": "too_short", "min_chars": "many"}])
    with pytest.raises(UsageError, match="normalize has no option 'x'; it takes none"):
        build_filters([{"name": "normalize", "x": 1}])


def test_apply_says_what_happened() -> None:
    filters = build_filters([*DEFAULT_FILTERS])
    clean = apply_filters(filters, doc(EN))
    assert (clean.document, clean.changed_by, clean.dropped_by) == (doc(EN), (), "")
    fixed = apply_filters(filters, doc(EN.replace("\n", " \r\n") + "Ask jane@corp.com for more.\n", gid="the-gid"))
    assert fixed.document == doc(EN + "Ask <email> for more.\n", gid="the-gid")
    assert fixed.changed_by == ("normalize", "pii")
    gone = apply_filters(filters, doc("Menu\r\n"))
    assert (gone.document, gone.dropped_by, gone.reason) == (None, "too_short", "too short")
    assert gone.changed_by == ("normalize",)
    emptied = apply_filters(build_filters(["html_comments"]), doc("<!-- all of it -->"))
    assert (emptied.document, emptied.reason) == (None, "nothing left")


def test_good_text_passes_the_default_list_unchanged() -> None:
    filters = build_filters(DEFAULT_FILTERS)
    for document in (doc(ZH), doc(VERSE), doc(EN), code(CODE)):
        assert apply_filters(filters, document).document == document


def test_code_is_byte_identical_through_the_default_list() -> None:
    filters = build_filters(DEFAULT_FILTERS)
    unusual = (
        "if x:\n\tif y:   \n \t  z = 'a\u200bb\u00adc'\t\n\n\n\n\n\n\n"
        "\x0c\nclass Ａ:\n\tmail = 'jane@corp.com'  # e\u0301\n"
    )
    assert apply_filters(filters, code(unusual)).document == code(unusual)
    windows = code(unusual.replace("\n", "\r\n"))  # becomes \n, and nothing else changes
    assert apply_filters(filters, windows).document == code(unusual)


def test_bound_filters_travel_to_other_processes() -> None:
    filters = pickle.loads(pickle.dumps(build_filters(DEFAULT_FILTERS)))
    assert apply_filters(filters, doc("Menu")).dropped_by == "too_short"


def test_every_filter_has_help_and_a_test() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    for plugin in builtin("filter"):
        assert len(plugin.help) > 40, plugin.name
        assert f'"{plugin.name}"' in tests, plugin.name


OFTEN = st.sampled_from("\r\n\t\x00\x85\u200d\u2028\ufeff`~$#{}<>@-=[]().0123456789aA的，。…")
ODD_TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), OFTEN), max_size=300)


@pytest.fixture(scope="module")
def quality_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("quality") / "model"
    train_quality_model(GOOD[:10], BAD[:10], out, epochs=1)
    return str(out)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(content=ODD_TEXT, repeats=st.integers(1, 30), title=st.sampled_from(["", "a/b.py"]), others=ODD_TEXT)
@example(content="", repeats=1, title="", others="")
@example(content="<!--```\n{{<", repeats=3, title="", others='{"license": [1]}')
def test_no_filter_fails_on_any_text(quality_model: str, content: str, repeats: int, title: str, others: str) -> None:
    document = doc(content * repeats, title=title, others=others)
    for name in builtin_names("filter"):
        if name == "language":
            continue  # its own test below: the model takes most of the time
        options = {"model": quality_model} if name == "quality_score" else {}
        result = verdict(name, document, **options)
        assert isinstance(result, Keep | Drop | Change)
        if isinstance(result, Change):
            result.content.encode()  # nothing that a file cannot hold


HOSTILE = [
    "<!--", "```a\n", "~~~~\n", "{{<", "{{a ", "$", "$$a", "[", "](", "@a.", "1.", "1 ", "13-", "\n ", " ", "\t", "(",
    "-----BEGIN PRIVATE KEY-----" + "\n" * 19_000, "'a=", "#", "的", "\u200d", "a" * 70 + "@",
    "-----BEGIN PRIVATE KEY-----", "import a ", "<a ", "http://",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("title", ["", "a/b.py"])
def test_hostile_text_is_passed_in_time(quality_model: str, title: str) -> None:
    """A pattern that scans everything again from every position would take a minute for one of these."""
    for part in HOSTILE:
        document = doc("{{< 一些字 and words " + part * (200_000 // len(part)), title=title)
        for name in builtin_names("filter"):
            begin = time.process_time()
            verdict(name, document, **({"model": quality_model} if name == "quality_score" else {}))
            assert time.process_time() - begin < 5, (name, part[:40])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(content=ODD_TEXT, title=st.sampled_from(["", "a/b.py"]))
def test_normalize_has_nothing_to_do_the_second_time(content: str, title: str) -> None:
    first = verdict("normalize", doc(content, title=title))
    if isinstance(first, Change):
        kept("normalize", doc(first.content, title=title))


# --- fenced listings: one pass over the text, equal to the plain pattern where fences have one length ----------------

PLAIN = re.compile(r"(^[ \t]{0,8}(`{3,}|~{3,})[^\n]*\n(?:.*?\n)??[ \t]{0,8}\2[^\n]*$)", re.MULTILINE | re.DOTALL)


def test_listings_are_those_of_the_plain_pattern() -> None:
    rng = random.Random(0)
    lines = ["```", "~~~", "```python", "  ```", "text", "", "~~", "`code`", "    ~~~ end"]
    for _ in range(2000):
        text = "\n".join(rng.choices(lines, k=rng.randrange(12)))
        pieces = PLAIN.split(text)
        assert split_listings(text) == [piece for number, piece in enumerate(pieces) if number % 3 != 2], text


def test_a_longer_fence_contains_a_shorter_one() -> None:
    text = "a\n````\n```\nx\n```\n````\nb"
    assert split_listings(text) == ["a\n", "````\n```\nx\n```\n````", "\nb"]
    assert split_listings("````\nx\n```") == ["````\nx\n```"]


def test_comments_of_html() -> None:
    assert strip_html_comments("a<!-- x -->  \nb<!-- y -->c<!-- open") == "abc<!-- open"
    assert strip_html_comments("<!-->x-->y") == "y"
    assert strip_html_comments("-->a<!--") == "-->a<!--"
