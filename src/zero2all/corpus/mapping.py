"""Which field of a record becomes which of ours: by rules that a recipe can write down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zero2all.corpus.document import Document, clean, make_gid
from zero2all.errors import UsageError
from zero2all.recipe import SourceRecipe

OURS = ("id", "category", "title", "content", "desc")

# Where a record's text and labels usually stand, tried in this order when nothing says where they are.
USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "id": ("id", "qid", "news_id", "doc_id", "uid", "_id"),
    "category": ("category", "topic", "type", "department"),
    "title": ("title", "name", "path", "rhythmic", "meta.title"),
    "content": (
        "content", "text", "body", "markdown", "code", "answer", "paragraphs", "raw_content", "html", "original",
        "{instruction}\n{input}\n{output}",
    ),
    "desc": ("desc", "description", "summary", "ask"),
}  # fmt: skip

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Found:
    """The text a rule gave, and the fields of the record it used up."""

    text: str
    used: tuple[str, ...]


@dataclass(frozen=True)
class FieldMapping:
    """For each of our fields, rules that are tried in turn until one gives text.

    A rule is the name of a field (``text``), a path into nested ones (``meta.title``) or a template
    (``{title}\\n{desc}\\n{answer}``), of which lines with nothing in them are dropped. A list of strings is joined by
    line feeds. What no rule used goes to ``others``.
    """

    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: USUAL_NAMES)

    def with_rules(self, rules: Mapping[str, str | tuple[str, ...]]) -> FieldMapping:
        """The same, but for these fields."""
        given = {ours: (rule,) if isinstance(rule, str) else rule for ours, rule in rules.items()}
        return replace(self, rules={**self.rules, **given})

    def document(
        self, record: Mapping[str, Any], data_src: str, place: str, category: str = "", whole: bool = False
    ) -> Document | None:
        """A record in our schema, or None if it holds no text. ``place`` names it where it has no id of its own.

        ``whole`` says that the record is a file, made by a reader in the usual names, to which no rule applies.
        """
        if whole:
            return AUTOMATIC.document(record, data_src, place, category)
        found = self.find(record)
        if "content" not in found:
            return None
        text = {ours: clean(one.text) for ours, one in found.items()}
        rest = self.rest(record, found)
        return Document(
            gid=make_gid(data_src, text.get("id", ""), text["content"]),
            id=text.get("id") or clean(place),
            data_src=data_src,
            category=text.get("category") or category,
            title=text.get("title", ""),
            content=text["content"],
            desc=text.get("desc", ""),
            others=clean(json.dumps(rest, ensure_ascii=False, sort_keys=True, default=str)) if rest else "",
        )

    def find(self, record: Mapping[str, Any]) -> dict[str, Found]:
        """What the rules give for a record, by our names; fields without text are not there."""
        found = {}
        for ours in OURS:
            for rule in self.rules.get(ours, ()):
                one = _apply(rule, record, ours == "id")
                if one is not None:
                    found[ours] = one
                    break
        return found

    def rest(self, record: Mapping[str, Any], found: Mapping[str, Found]) -> dict[str, Any]:
        """What no rule used and is not empty."""
        used = {name for one in found.values() for name in one.used}
        kept = {}
        for key, value in record.items():
            if key in used or value in (None, ""):
                continue
            inside = {name[len(key) + 1 :] for name in used if name.startswith(f"{key}.")}
            kept[key] = _without(value, inside) if inside else value
        return kept


AUTOMATIC = FieldMapping()

# name: (fields that a record of this kind has, rules)
_READY: dict[str, tuple[tuple[str, ...], dict[str, str | tuple[str, ...]]]] = {
    "baike2018qa": (
        ("qid", "title", "answer"),
        {"id": "qid", "category": "category", "title": "title", "desc": "desc", "content": "{title}\n{desc}\n{answer}"},
    ),
    "new2016zh": (
        ("news_id", "title", "content"),
        {"id": "news_id", "category": "keywords", "title": "title", "desc": "desc", "content": "content"},
    ),
    "webtext2019zh": (
        ("qid", "title", "content"),
        {"id": ("answer_id", "qid"), "category": "topic", "title": "title", "desc": "desc",
         "content": "{title}\n{desc}\n{content}"},
    ),
    "zhihu-kol": (
        ("INSTRUCTION", "RESPONSE"),
        {"category": "SOURCE", "title": "INSTRUCTION", "content": "{INSTRUCTION}\n{RESPONSE}"},
    ),
    "wudao": (
        ("uniqueKey", "title", "content"),
        {"id": ("uniqueKey", "id"), "category": "dataType", "title": "title", "content": "content"},
    ),
    "github-python": (
        ("repo_name", "path"),
        {"id": "{repo_name}/{path}", "category": "language", "title": "path", "content": ("content", "code")},
    ),
    "fineweb": (("text", "dump", "url"), {"id": "id", "content": "text"}),
    "c4": (("text", "timestamp", "url"), {"id": "url", "content": "text"}),
    "alpaca": (
        ("instruction", "output"),
        {"title": "instruction", "content": "{instruction}\n{input}\n{output}"},
    ),
    "poetry": (
        ("paragraphs", "author"),
        {"id": "id", "title": ("title", "rhythmic"), "content": "paragraphs"},
    ),
    "wikipedia": (("id", "title", "text"), {"id": "id", "title": "title", "content": "text"}),
}  # fmt: skip

READY: dict[str, FieldMapping] = {
    "automatic": AUTOMATIC,
    **{name: AUTOMATIC.with_rules(rules) for name, (_, rules) in _READY.items()},
}


def mapping_for(source: SourceRecipe) -> FieldMapping:
    """What the recipe chose for a source: a ready mapping, single fields over it, or the usual names."""
    name = source.mapping or "automatic"
    if name not in READY:
        raise UsageError(f"corpus source {source.name!r}: no mapping {name!r}; there are {', '.join(READY)}")
    for ours, rule in source.fields.items():
        if "{" in rule and not all(_NAME.fullmatch(used) for used in _PLACEHOLDER.findall(rule)):
            raise UsageError(f"corpus source {source.name!r}: fields.{ours}: {rule!r} is not a template of field names")
    return READY[name].with_rules(source.fields)


def propose(names: Iterable[str]) -> str:
    """The ready mapping whose records have these fields; the automatic one if none does."""
    there = set(names)
    return next((name for name, (signs, _) in _READY.items() if there.issuperset(signs)), "automatic")


def _apply(rule: str, record: Mapping[str, Any], numbers: bool) -> Found | None:
    if "{" not in rule:
        text = _text(_value(record, rule), numbers)
        return Found(text, (rule,)) if text.strip() else None
    used: list[str] = []
    kept_lines = []
    for line in rule.split("\n"):
        names = _PLACEHOLDER.findall(line)
        texts = {name: _text(_value(record, name), numbers=True) for name in names}
        if not names or any(text.strip() for text in texts.values()):
            kept_lines.append(_PLACEHOLDER.sub(lambda match, texts=texts: texts[match[1]], line))  # type: ignore[misc]
            used += [name for name in names if texts[name].strip()]
    return Found("\n".join(kept_lines), tuple(used)) if used else None


def _value(record: Mapping[str, Any], path: str) -> Any:
    """By its whole name first: names with dots in them exist."""
    if path in record or "." not in path:
        return record.get(path)
    first, _, rest = path.partition(".")
    inner = record.get(first)
    return _value(inner, rest) if isinstance(inner, Mapping) else None


def _text(value: Any, numbers: bool) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if numbers and isinstance(value, int):
        return str(value)
    return ""


def _without(value: Any, paths: set[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        key: _without(part, {path[len(key) + 1 :] for path in paths if path.startswith(f"{key}.")})
        for key, part in value.items()
        if key not in paths
    }
