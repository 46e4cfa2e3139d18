"""Mapping from a record's fields to document fields, by rules that a recipe can set."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zero2all.base.errors import UsageError
from zero2all.base.package_data import read_package_table
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
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=str)
_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_NAME = re.compile(r"[\w.-]+(?:\|html)?")
HTML_SUFFIX = "|html"


RuleMatch = tuple[str, tuple[str, ...]]  # the text a rule gave, and the fields of the record it used up


@dataclass(frozen=True)
class FieldMapping:
    """For each of our fields, rules that are tried in turn until one gives text.

    A rule is a field name (``text``), a path into nested fields (``meta.title``) or a template
    (``{title}\\n{desc}\\n{answer}``), of which lines with nothing in them are dropped. ``body|html`` is the text of a
    field that holds HTML, also in a template. A list of strings is joined by line feeds. What no rule used goes to
    ``others``.
    """

    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DEFAULT_FIELD_NAMES)

    def with_rules(self, rules: Mapping[str, str | Sequence[str]]) -> FieldMapping:
        """The same, but for these fields."""
        given = {ours: (rule,) if isinstance(rule, str) else tuple(rule) for ours, rule in rules.items()}
        return replace(self, rules={**self.rules, **given})

    def map_record(self, record: Mapping[str, Any]) -> dict[str, str] | None:
        """A record's texts under our names, and as ``others`` what no rule used; None if it holds no content."""
        texts: dict[str, str] = {}
        used: set[str] = set()
        for ours in DOCUMENT_FIELDS:
            for rule in self.rules.get(ours, ()):
                match = _apply_rule(rule, record, allow_numbers=ours == "id")
                if match is not None:
                    texts[ours] = match[0]
                    used.update(match[1])
                    break
        if "content" not in texts:
            return None
        rest = {key: value for key, value in unused_fields(record, used).items() if value is not None and value != ""}
        texts["others"] = _ENCODER.encode(rest) if rest else ""
        return texts


AUTOMATIC = FieldMapping()

_KNOWN = read_package_table(__package__, "mapping_presets.toml")

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


def _apply_rule(rule: str, record: Mapping[str, Any], *, allow_numbers: bool) -> RuleMatch | None:
    if "{" not in rule:
        text = _field_text(record, rule, allow_numbers=allow_numbers)
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


def _field_text(record: Mapping[str, Any], name: str, *, allow_numbers: bool) -> str:
    text = _to_text(lookup_field(record, name.removesuffix(HTML_SUFFIX)), allow_numbers=allow_numbers)
    if not name.endswith(HTML_SUFFIX) or not text:
        return text
    from zero2all.corpus.readers.web_pages import html_to_text  # here, because readers import the default field names

    return html_to_text(text)


def lookup_field(record: Mapping[str, Any], path: str) -> Any:
    """Look up a field by its full name first: names with dots in them exist."""
    if path in record or "." not in path:
        return record.get(path)
    first, _, rest = path.partition(".")
    inner = record.get(first)
    return lookup_field(inner, rest) if isinstance(inner, Mapping) else None


def _to_text(value: Any, *, allow_numbers: bool) -> str:
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
