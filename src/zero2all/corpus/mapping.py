"""Which field of a record becomes which of ours: by rules that a recipe can write down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring
from typing import Any

from zero2all.errors import UsageError
from zero2all.recipe import SourceRecipe

OURS = ("id", "category", "title", "content", "desc")

# Where a record's text and labels usually stand, tried in this order when nothing says where they are.
USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "id": ("id", "qid", "news_id", "doc_id", "uid", "_id"),
    "category": ("category", "topic", "type", "department"),
    "title": ("title", "name", "path", "rhythmic", "meta.title"),
    "content": (
        "content", "text", "body", "markdown", "code", "answer", "paragraphs", "raw_content", "html|html", "original",
        "{instruction}\n{input}\n{output}",
    ),
    "desc": ("desc", "description", "summary", "ask"),
}  # fmt: skip

PLANS_KEPT = 1000  # for sets of keys; records whose keys are data would fill memory with them
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=str)
_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_NAME = re.compile(r"[\w.-]+(?:\|html)?")
HTML = "|html"


Found = tuple[str, tuple[str, ...]]  # the text a rule gave, and the fields of the record it used up


@dataclass(frozen=True)
class _Plan:
    """For records with the same keys: the rules that can apply, and by the fields they used what is left for others."""

    rules: tuple[tuple[str, tuple[str, ...]], ...]
    unused: dict[tuple[str, ...], list[tuple[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class FieldMapping:
    """For each of our fields, rules that are tried in turn until one gives text.

    A rule is the name of a field (``text``), a path into nested ones (``meta.title``) or a template
    (``{title}\\n{desc}\\n{answer}``), of which lines with nothing in them are dropped. ``body|html`` is the text of a
    field that holds HTML, also in a template. A list of strings is joined by line feeds. What no rule used goes to
    ``others``.
    """

    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: USUAL_NAMES)
    _plans: dict[tuple[str, ...], _Plan] = field(default_factory=dict, init=False, compare=False, repr=False)

    def with_rules(self, rules: Mapping[str, str | tuple[str, ...]]) -> FieldMapping:
        """The same, but for these fields."""
        given = {ours: (rule,) if isinstance(rule, str) else rule for ours, rule in rules.items()}
        return replace(self, rules={**self.rules, **given})

    def row(self, record: Mapping[str, Any]) -> dict[str, str] | None:
        """A record's texts under our names, and as ``others`` what no rule used; None if it holds no content."""
        plan = self._plan(tuple(record))
        texts: dict[str, str] = {}
        used: tuple[str, ...] = ()
        for ours, rules in plan.rules:
            for rule in rules:
                value = record.get(rule)
                if isinstance(value, str) and value and not value.isspace():  # by far the usual case
                    texts[ours] = value
                    used += (rule,)
                    break
                found = _apply(rule, record, ours == "id")
                if found is not None:
                    texts[ours] = found[0]
                    used += found[1]
                    break
        if "content" not in texts:
            return None
        texts["others"] = self._others(record, plan, used)
        return texts

    def _plan(self, keys: tuple[str, ...]) -> _Plan:
        """The rules that can give something for records with these keys. Mostly all records of a file have the same."""
        plan = self._plans.get(keys)
        if plan is None:
            if len(self._plans) >= PLANS_KEPT:
                self._plans.clear()
            there = {*keys, *(f"{key}." for key in keys)}
            rules = {ours: tuple(rule for rule in self.rules.get(ours, ()) if _fits(rule, there)) for ours in OURS}
            plan = self._plans[keys] = _Plan(tuple((ours, some) for ours, some in rules.items() if some))
        return plan

    def _others(self, record: Mapping[str, Any], plan: _Plan, used: tuple[str, ...]) -> str:
        """What is left and not empty, as JSON with its keys in order."""
        unused = plan.unused.get(used)
        if unused is None:
            names = set(used)
            unused = [(key, f"{encode_basestring(key)}: ") for key in sorted(record) if key not in names]
            if names.issubset(record):
                plan.unused[used] = unused
            else:  # something inside a field was used, and the rest of that field was not
                record = _rest(record, names)
                unused = [(key, prefix) for key, prefix in unused if key in record]
        parts = []
        for key, prefix in unused:
            value = record[key]
            if isinstance(value, str):
                if value:
                    parts.append(prefix + encode_basestring(value))
            elif value is not None:
                parts.append(prefix + _ENCODER.encode(value))
        return f"{{{', '.join(parts)}}}" if parts else ""


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


def _fits(rule: str, there: set[str]) -> bool:
    """Whether a rule can give something; ``there`` has the fields of a record, and each once more with a dot."""
    names = [name.removesuffix(HTML) for name in _PLACEHOLDER.findall(rule)] or [rule.removesuffix(HTML)]
    return any(name in there or f"{name.partition('.')[0]}." in there for name in names)


def _apply(rule: str, record: Mapping[str, Any], numbers: bool) -> Found | None:
    if "{" not in rule:
        text = _field_text(record, rule, numbers)
        return (text, (rule.removesuffix(HTML),)) if text.strip() else None
    used: list[str] = []
    kept_lines = []
    for line in rule.split("\n"):
        names = _PLACEHOLDER.findall(line)
        texts = {name: _field_text(record, name, numbers=True) for name in names}
        if not names or any(text.strip() for text in texts.values()):
            kept_lines.append(_PLACEHOLDER.sub(lambda match, texts=texts: texts[match[1]], line))  # type: ignore[misc]
            used += [name.removesuffix(HTML) for name in names if texts[name].strip()]
    return ("\n".join(kept_lines), tuple(used)) if used else None


def _field_text(record: Mapping[str, Any], name: str, numbers: bool) -> str:
    text = _text(_value(record, name.removesuffix(HTML)), numbers)
    if not name.endswith(HTML) or not text:
        return text
    from zero2all.corpus.readers.pages import html_text  # readers know the usual names from here

    return html_text(text)


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


def _rest(record: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    """A record without the fields that were used, at any depth."""
    kept = {}
    for key, value in record.items():
        if key not in used:
            inside = {name[len(key) + 1 :] for name in used if name.startswith(f"{key}.")}
            kept[key] = _without(value, inside) if inside else value
    return kept


def _without(value: Any, paths: set[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        key: _without(part, {path[len(key) + 1 :] for path in paths if path.startswith(f"{key}.")})
        for key, part in value.items()
        if key not in paths
    }
