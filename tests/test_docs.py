"""Documentation: links and anchors, imports of examples, the vocabulary, and two languages with one structure."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import FAULTS
from zero2all.recipe import recipe_schema

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "recipes", "contrib")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md")))
)
ENGLISH = [page for page in PAGES if not page.endswith(".zh-CN.md")]
PAIRS = [page for page in ENGLISH if page.replace(".md", ".zh-CN.md") in PAGES]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
RETIRED = re.compile(
    r"\b(mend(s|ed|ing)?|alike|anew|held[- ]out|go(es|ing)? on with|passed over|dearest|for want of|"
    r"token after next|figures?)\b",
    re.IGNORECASE,
)
RETIRED_CHINESE = re.compile(
    r"各通道|通道损失|留出文本|接着跑下去|未曾见过的文本|"
    r"损失尖峰|检查点|逐位(?=一致|相同|恢复)|[\d单每] ?[个块] ?GPU(?! 小时)"
)
TERMS = {
    "docs/explain/training-step.md": (
        "training step", "gradient accumulation", "micro-batch", "mixed precision", "learning rate", "warmup",
        "data loader", "validation", "packing",
    ),
    "docs/how-to/scale/parallelism.md": (
        "data parallel", "tensor parallel", "pipeline parallel", "context parallel", "expert parallel", "sharding",
        "all-reduce",
    ),
    "docs/how-to/survive/launch.md": ("elastic", "rendezvous", "heartbeat", "checkpoint"),
    "docs/how-to/survive/checkpoint-interval.md": ("goodput", "in-memory checkpoints"),
    "docs/how-to/survive/spike.md": ("rollback", "gradient norm", "outlier"),
    "docs/how-to/watch/sinks.md": ("metric", "TensorBoard"),
    "docs/reference/metrics.md": ("gradient norm", "throughput", "MFU"),
    "docs/how-to/data/deduplicate.md": ("deduplication", "MinHash"),
    "docs/how-to/tokenizer/train.md": ("byte-level BPE", "vocabulary", "special token", "pre-tokenizer"),
    "docs/how-to/model/configure.md": ("grouped-query attention", "RMSNorm", "mixture of experts", "kernel", "mask"),
    "docs/how-to/scale/plan.md": ("FLOPs", "MFU", "optimizer state", "activation"),
}  # fmt: skip
UNSUPPORTED = re.compile(r"\b(?:not supported|unsupported|no support)\b|不支持", re.IGNORECASE)
CONDITION = re.compile(r"\b(?:with|without|under|on|for|if|when)\b|与|同时|时|下|上", re.IGNORECASE)
SYNONYMS = {"float8": "fp8"}
WORDS_OF_SENTENCES = {"auto", "none", "text", "last", "every", "always", "never", "all", "global", "local", "code"}


@cache
def prose(page: str) -> str:
    """The text of a page without its code blocks."""
    return FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


def headings(page: str) -> list[tuple[int, str]]:
    return [(len(marks), text) for marks, text in re.findall(r"^(#{1,6}) +(.+?) *$", prose(page), re.MULTILINE)]


def code(page: str) -> list[tuple[str, str]]:
    """The blocks of a page without comments and texts in quotes, which are written in its language.

    Nor with spaces inside brackets: the formatter breaks a line by the width of its texts.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(sh|python|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    stripped = [(language, re.sub(r"(^|\s+)#.*", "", block, flags=re.MULTILINE)) for language, block in found]
    words = [(language, " ".join(re.sub(r'"[^"\n]*"', '""', block).split())) for language, block in stripped]
    return [(language, re.sub(r"(?<=[(\[{]) | (?=[)\]}])", "", block)) for language, block in words]


def structure(page: str) -> dict[str, object]:
    """What both languages of a page have in common."""
    text = prose(page)
    tables = re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE)
    return {
        "headings": [level for level, _ in headings(page)],
        "tables": [(table.count("\n"), table.partition("\n")[0].count("|")) for table in tables],
        "blocks": len(FENCE.findall((ROOT / page).read_text(encoding="utf-8"))),
        "images": text.count("!["),
        "items": len(re.findall(r"^ *[-*] ", text, re.MULTILINE)),
        "code": code(page),
        "generated": sorted(re.findall(r"<!-- generated: (\S+) -->", text)),
    }


def relative(path: Path) -> str:
    return path.resolve().relative_to(ROOT.resolve()).as_posix()


@cache
def anchors(page: str) -> set[str]:
    """As GitHub makes them: lower case, punctuation removed, spaces to hyphens, repeated ones numbered."""
    found: set[str] = set()
    for _, text in headings(page):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        slug = base = re.sub(r"[^\w\- ]", "", text.lower().replace("`", "")).replace(" ", "-")
        number = 0
        while slug in found:
            number += 1
            slug = f"{base}-{number}"
        found.add(slug)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    broken = []
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(relative(path))):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES)
def test_imports_of_examples_exist(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for module, names in re.findall(r"^ *from (zero2all[\w.]*) import ([\w, ]+)$", "\n".join(blocks), re.MULTILINE):
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), f"{module} has no {name.strip()}"


@pytest.mark.parametrize("page", PAIRS)
def test_both_languages_have_the_same_structure_and_commands(page: str) -> None:
    assert structure(page) == structure(page.replace(".md", ".zh-CN.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_no_retired_word(page: str) -> None:
    text = re.sub(r"`[^`\n]*`", "", prose(page))  # names of commands and faults
    patterns = [RETIRED] if "glossary" in page else [RETIRED, RETIRED_CHINESE]  # it lists synonyms
    found = [match.group() for pattern in patterns for match in pattern.finditer(text)]
    assert not found


@cache
def accepted_names() -> re.Pattern[str]:
    """Values that a key of a recipe may have, and keys that are off by default."""

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (value for value in node.get("enum", [node.get("const")]) if isinstance(value, str))
            for name, child in (node.get("properties") or {}).items():
                if child.get("default", 0) in (None, False):
                    yield name
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else []:
            yield from walk(child)

    names = {name for name in walk(json.loads(recipe_schema())) if len(name) > 2} - WORDS_OF_SENTENCES
    names |= {other for name, other in SYNONYMS.items() if name in names}
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, sorted(names)))})(?![\w-])", re.IGNORECASE)


def false_limits(text: str) -> list[str]:
    """Statements that something is not supported which a recipe accepts, without saying when it is not."""
    statements: list[str] = []
    in_list = False
    for paragraph in re.split(r"\n(?= *(?:[-*|]|\d+\.) )|\n\s*\n", text):
        one = " ".join(paragraph.split())
        if in_list and one.startswith(("- ", "* ")):
            statements.append(one)
            continue
        sentences = [sentence for sentence in re.split(r"(?<=[.。;；])\s*", one) if UNSUPPORTED.search(sentence)]
        in_list = bool(sentences) and one.endswith((":", "："))
        statements += [] if in_list else sentences
    return [one for one in statements if accepted_names().search(one) and not CONDITION.search(one)]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_what_a_recipe_accepts_is_not_called_unsupported(page: str) -> None:
    assert false_limits(prose(page)) == []


def test_a_false_limit_is_found() -> None:
    assert false_limits("Not supported:\n\n- ring attention;\n- tied embeddings.\n") == ["- ring attention;"]
    assert false_limits("- **Not supported yet**: FP8. There are no weights.") == ["- **Not supported yet**: FP8."]
    assert false_limits("- **暂不支持**：FP8、公开权重。") != []
    assert false_limits("Not supported:\n\n- `train.float8` with tp;\n\nRing attention is fast.\n") == []


def test_the_number_of_faults_is_right() -> None:
    for page in PAGES:
        text = re.sub(r"<!--.*?-->", "", prose(page))
        assert set(re.findall(r"\b\d+(?= faults| injected faults|种故障| 种故障)", text)) <= {str(len(FAULTS))}, page


@pytest.mark.parametrize(("page", "terms"), TERMS.items(), ids=TERMS)
def test_a_page_has_the_terms_of_its_feature(page: str, terms: tuple[str, ...]) -> None:
    text = " ".join(prose(page).lower().split())
    missing = [term for term in terms if term.lower() not in text]
    assert not missing
