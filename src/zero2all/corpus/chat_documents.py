"""Conversations as documents: what was said is ``content``, and the messages themselves are in ``others``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from zero2all.base.conversation import ChatExample, MalformedConversationError, SourceKind
from zero2all.base.plugins import BoundPlugin
from zero2all.corpus.chat_shapes import find_example
from zero2all.corpus.document import Document
from zero2all.corpus.filters.filter_registry import Change, Drop, FilterOutcome
from zero2all.corpus.mapping import (
    AUTOMATIC,
    DEFAULT_FIELD_NAMES,
    FieldMapping,
    lookup_field,
    resolve_mapping,
    unused_fields,
)
from zero2all.corpus.readers.base import UnreadableItemError
from zero2all.recipe import SourceRecipe


class RecordMapping(Protocol):
    def map_record(self, record: Mapping[str, Any]) -> dict[str, str] | None: ...


def record_mapping(source: SourceRecipe) -> RecordMapping:
    """How the records of a source become documents."""
    if source.kind == "text":
        return resolve_mapping(source)
    rules = {ours: rule for ours, rule in source.fields.items() if ours != "content"}
    ids = (*DEFAULT_FIELD_NAMES["id"], "conversation_id")
    return ConversationMapping(
        AUTOMATIC.with_rules({"id": ids, "content": "content", **rules}), source.fields.get("content"), source.kind
    )


@dataclass(frozen=True)
class ConversationMapping:
    """Records that are conversations."""

    fields: FieldMapping
    """For all fields but the messages."""
    messages_field: str | None
    """Where the messages are; None: they are found by the shape of the record."""
    kind: SourceKind

    def map_record(self, record: Mapping[str, Any]) -> dict[str, str] | None:
        """Map it like ``FieldMapping``; raises UnreadableItemError with the reason if it is not a conversation."""
        path = self.messages_field or ""
        outer, _, field = ("", "", path) if path in record else path.rpartition(".")
        holder = lookup_field(record, outer) if outer else record  # tools and system prompt are beside the messages
        try:
            found = find_example(holder if isinstance(holder, Mapping) else {}, self.kind, field or None)
        except MalformedConversationError as error:
            raise UnreadableItemError(str(error)) from error
        used = {f"{outer}.{name}" if outer else name for name in found.used}
        row = self.fields.map_record({**unused_fields(record, used), "content": found.example.text})
        return row and {**row, "others": _to_others(row["others"], found.example)}


def filter_example(kind: SourceKind, filters: Sequence[BoundPlugin], document: Document) -> FilterOutcome:
    """``apply_filters`` for conversations: filters judge what was said as a whole, and change each message alone.

    Thus no message ends inside another, and masked text is masked in the messages.
    """
    example = ChatExample.from_json(json.loads(document.others), kind)
    changed_by: list[str] = []
    for one in filters:
        judged = replace(document, content=example.text, others="")  # a path in a call does not make it code
        result = one(judged)
        if isinstance(result, Drop):
            return FilterOutcome(None, one.name, result.reason, tuple(changed_by))
        changed = example.map_text(lambda text, one=one: _change_text(one, document, text))  # type: ignore[misc]
        if changed == example:
            continue
        changed_by.append(one.name)
        try:
            example = ChatExample.from_json(changed.to_json(), kind)
        except MalformedConversationError:
            return FilterOutcome(None, one.name, "nothing left", tuple(changed_by))
    if changed_by:
        others = _to_others(document.others, example)
        document = replace(document, content=example.text, others=others)
    return FilterOutcome(document, changed_by=tuple(changed_by))


def _change_text(one: BoundPlugin, document: Document, text: str) -> str:
    result = one(replace(document, content=text, others=""))
    return result.content if isinstance(result, Change) else text


def _to_others(others: str, example: ChatExample) -> str:
    """``others`` with the messages. The keys inside them keep their order, which the chat template shows."""
    return json.dumps({**json.loads(others or "{}"), **example.to_json()}, ensure_ascii=False)
