"""Mapping from a record's fields to document fields, by rules that a recipe can set."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from json.encoder import encode_basestring
from typing import Any

from zero2all.errors import UsageError
from zero2all.recipe import SourceRecipe

DOCUMENT_FIELDS = ("id", "category", "title", "content", "desc")

# Usual names of a record's text and labels, tried in this order when the recipe names none.
DEFAULT_FIELD_NAMES: dict[str, tuple[str, ...]] = {
    "id": ("id", "qid", "news_id", "doc_id", "uid", "_id"),
    "category": ("category", "topic", "type", "department"),
    "title": ("title", "name", "path", "rhythmic", "meta.title"),
    "content": (
        "content", "text", "body", "markdown", "code", "answer", "paragraphs", "raw_content", "html|html", "original",
        "{instruction}\n{input}\n{output}",
    ),
    "desc": ("desc", "description", "summary", "ask"),
}  # fmt: skip

MAX_CACHED_RULE_SETS = 1000  # for sets of keys; records whose keys are data would fill memory
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=str)
_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_NAME = re.compile(r"[\w.-]+(?:\|html)?")
HTML_SUFFIX = "|html"


RuleMatch = tuple[str, tuple[str, ...]]  # the text a rule gave, and the fields of the record it used up


@dataclass(frozen=True)
class _RuleSet:
    """For records with the same keys: the rules that can apply, and the unused fields by the fields used."""

    rules: tuple[tuple[str, tuple[str, ...]], ...]
    unused: dict[tuple[str, ...], list[tuple[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class FieldMapping:
    """For each of our fields, rules that are tried in turn until one gives text.

    A rule is a field name (``text``), a path into nested fields (``meta.title``) or a template
    (``{title}\\n{desc}\\n{answer}``), of which lines with nothing in them are dropped. ``body|html`` is the text of a
    field that holds HTML, also in a template. A list of strings is joined by line feeds. What no rule used goes to
    ``others``.
    """

    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DEFAULT_FIELD_NAMES)
    _rule_sets: dict[tuple[str, ...], _RuleSet] = field(default_factory=dict, init=False, compare=False, repr=False)

    def with_rules(self, rules: Mapping[str, str | Sequence[str]]) -> FieldMapping:
        """The same, but for these fields."""
        given = {ours: (rule,) if isinstance(rule, str) else tuple(rule) for ours, rule in rules.items()}
        return replace(self, rules={**self.rules, **given})

    def map_record(self, record: Mapping[str, Any]) -> dict[str, str] | None:
        """A record's texts under our names, and as ``others`` what no rule used; None if it holds no content."""
        rule_set = self._rule_set(tuple(record))
        texts: dict[str, str] = {}
        used: tuple[str, ...] = ()
        for ours, rules in rule_set.rules:
            for rule in rules:
                value = record.get(rule)
                if isinstance(value, str) and value and not value.isspace():  # the common case
                    texts[ours] = value
                    used += (rule,)
                    break
                match = _apply_rule(rule, record, ours == "id")
                if match is not None:
                    texts[ours] = match[0]
                    used += match[1]
                    break
        if "content" not in texts:
            return None
        texts["others"] = self._others(record, rule_set, used)
        return texts

    def _rule_set(self, keys: tuple[str, ...]) -> _RuleSet:
        """The rules that can give something for records with these keys. Mostly all records of a file have the same."""
        rule_set = self._rule_sets.get(keys)
        if rule_set is None:
            if len(self._rule_sets) >= MAX_CACHED_RULE_SETS:
                self._rule_sets.clear()
            available = {*keys, *(f"{key}." for key in keys)}
            rules = {
                ours: tuple(rule for rule in self.rules.get(ours, ()) if _can_apply(rule, available))
                for ours in DOCUMENT_FIELDS
            }
            rule_set = self._rule_sets[keys] = _RuleSet(tuple((ours, some) for ours, some in rules.items() if some))
        return rule_set

    def _others(self, record: Mapping[str, Any], rule_set: _RuleSet, used: tuple[str, ...]) -> str:
        """What is left and not empty, as JSON with its keys in order."""
        unused = rule_set.unused.get(used)
        if unused is None:
            names = set(used)
            unused = [(key, f"{encode_basestring(key)}: ") for key in sorted(record) if key not in names]
            if names.issubset(record):
                rule_set.unused[used] = unused
            else:  # something inside a field was used, and the rest of that field was not
                record = unused_fields(record, names)
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

_KNOWN = tomllib.loads((files("zero2all.corpus") / "mapping_presets.toml").read_text(encoding="utf-8"))

MAPPING_PRESETS: dict[str, FieldMapping] = {
    "automatic": AUTOMATIC,
    **{name: AUTOMATIC.with_rules(preset["rules"]) for name, preset in _KNOWN.items()},
}


def resolve_mapping(source: SourceRecipe) -> FieldMapping:
    """What the recipe chose for a source: a preset, overridden by single fields, or the default field names."""
    name = source.mapping or "automatic"
    if name not in MAPPING_PRESETS:
        raise UsageError(f"corpus source {source.name!r}: no mapping {name!r}; there are {', '.join(MAPPING_PRESETS)}")
    for ours, rule in source.fields.items():
        if "{" in rule and not all(_NAME.fullmatch(used) for used in _PLACEHOLDER.findall(rule)):
            raise UsageError(f"corpus source {source.name!r}: fields.{ours}: {rule!r} is not a template of field names")
    return MAPPING_PRESETS[name].with_rules(source.fields)


def find_preset(names: Iterable[str]) -> str:
    """The preset whose records have these fields; ``automatic`` if none matches."""
    available = set(names)
    return next((name for name, preset in _KNOWN.items() if available.issuperset(preset["fields"])), "automatic")


def _can_apply(rule: str, available: set[str]) -> bool:
    """Whether a rule can give something; ``available`` has the fields of a record, and each once more with a dot."""
    names = [name.removesuffix(HTML_SUFFIX) for name in _PLACEHOLDER.findall(rule)] or [rule.removesuffix(HTML_SUFFIX)]
    return any(name in available or f"{name.partition('.')[0]}." in available for name in names)


def _apply_rule(rule: str, record: Mapping[str, Any], allow_numbers: bool) -> RuleMatch | None:
    if "{" not in rule:
        text = _field_text(record, rule, allow_numbers)
        return (text, (rule.removesuffix(HTML_SUFFIX),)) if text.strip() else None
    used: list[str] = []
    kept_lines = []
    for line in rule.split("\n"):
        names = _PLACEHOLDER.findall(line)
        texts = {name: _field_text(record, name, allow_numbers=True) for name in names}
        if not names or any(text.strip() for text in texts.values()):
            kept_lines.append(_PLACEHOLDER.sub(lambda match, texts=texts: texts[match[1]], line))  # type: ignore[misc]
            used += [name.removesuffix(HTML_SUFFIX) for name in names if texts[name].strip()]
    return ("\n".join(kept_lines), tuple(used)) if used else None


def _field_text(record: Mapping[str, Any], name: str, allow_numbers: bool) -> str:
    text = _to_text(lookup_field(record, name.removesuffix(HTML_SUFFIX)), allow_numbers)
    if not name.endswith(HTML_SUFFIX) or not text:
        return text
    from zero2all.corpus.readers.web_pages import html_to_text  # here, because readers import the default field names

    return html_to_text(text)


def lookup_field(record: Mapping[str, Any], path: str) -> Any:
    """By its full name first: names with dots in them exist."""
    if path in record or "." not in path:
        return record.get(path)
    first, _, rest = path.partition(".")
    inner = record.get(first)
    return lookup_field(inner, rest) if isinstance(inner, Mapping) else None


def _to_text(value: Any, allow_numbers: bool) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if allow_numbers and isinstance(value, int):
        return str(value)
    return ""


def unused_fields(record: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    """A record without the fields that were used, at any depth."""
    kept = {}
    for key, value in record.items():
        if key not in used:
            inside = {name[len(key) + 1 :] for name in used if name.startswith(f"{key}.")}
            kept[key] = _remove_paths(value, inside) if inside else value
    return kept


def _remove_paths(value: Any, paths: set[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        key: _remove_paths(part, {path[len(key) + 1 :] for path in paths if path.startswith(f"{key}.")})
        for key, part in value.items()
        if key not in paths
    }
