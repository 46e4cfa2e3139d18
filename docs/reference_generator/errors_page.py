"""The page of error messages, in both languages: the frequent ones with what to read, and all others by package."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import NamedTuple

from reference_generator.error_messages import Message, messages
from reference_generator.markdown import page, table
from zero2all.cli.error_pages import ERROR_PAGES, ErrorPage

DOCS = Path(__file__).parents[1]


class Words(NamedTuple):
    title: str
    introduction: str
    frequent: str
    what_to_do: str
    others: str
    message: str
    file: str


ENGLISH = Words(
    "Error messages",
    """\
Use this when `z2a` has printed an error: search this page for a word of the message. `{name}` stands for what the
message fills in. Below a message that many users meet, `z2a` also prints where it is explained, such as
`see docs/reference/errors.md#disk-full`. With `--json`, the message is the value of `error`. Exit status 2 means that
the command line or the recipe is wrong, 1 that something else failed.""",
    "Frequent messages",
    "What to do: [{title}]({page}).",
    "Other messages by package",
    "Message",
    "Raised in",
)
CHINESE = Words(
    "错误信息",
    """\
`z2a` 报错时，在本页搜索信息里的词。`{name}` 表示信息里会填入的内容。常见的错误，`z2a` 会在下一行打印说明的位置，例如
`see docs/reference/errors.md#disk-full`。加上 `--json` 时，信息在 `error` 字段里。退出码 2 表示命令行或配方写错了，
1 表示其他失败。""",
    "常见错误",
    "处理办法：[{title}]({page})。",
    "其他错误，按包排列",
    "信息",
    "所在文件",
)


def errors_page(*, chinese: bool = False) -> str:
    words = CHINESE if chinese else ENGLISH
    frequent = {code: [one for one in messages() if re.search(known.pattern, one.example)] for code, known in ENTRIES}
    shown = {one for found in frequent.values() for one in found}
    parts = [words.introduction, f"## {words.frequent}"]
    for code, known in ENTRIES:
        name = f"{known.page}{'.zh-CN' if chinese else ''}.md"
        link = words.what_to_do.format(title=title_of(name), page=posixpath.relpath(name, "reference"))
        parts += [f"### {code}", "\n".join(f"- {span(one)}" for one in frequent[code]), link]
    parts.append(f"## {words.others}")
    for package in sorted({one.package for one in messages()}):
        rows = [(span(one), f"`{one.file}`") for one in messages() if one.package == package and one not in shown]
        parts += [f"### {package}", table([words.message, words.file], rows)] if rows else []
    return page(words.title, *parts, chinese=chinese)


ENTRIES: list[tuple[str, ErrorPage]] = sorted(ERROR_PAGES.items())


def title_of(name: str) -> str:
    """The heading of a page, or its path as long as the page is not written."""
    path = DOCS / name
    heading = re.search(r"^# (.+)$", path.read_text("utf-8"), re.MULTILINE) if path.exists() else None
    return heading[1] if heading else name


def span(message: Message) -> str:
    """A message in code font."""
    text = " ".join(message.template.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"
