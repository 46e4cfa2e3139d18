"""The one schema of a document, and how a record of any shape becomes one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("gid", pa.string()),
        ("id", pa.string()),
        ("data_src", pa.string()),
        ("category", pa.string()),
        ("title", pa.string()),
        ("content", pa.string()),
        ("desc", pa.string()),
        ("others", pa.string()),  # JSON: what the source said beyond the fields above
    ]
)

# Where a record's text and labels usually stand, tried in this order when the recipe does not say.
USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "id": ("id", "qid", "news_id", "doc_id", "uid", "_id"),
    "category": ("category", "topic", "type"),
    "title": ("title", "name", "path"),
    "content": ("content", "text", "body", "markdown", "code", "answer"),
    "desc": ("desc", "description", "summary"),
}


@dataclass(frozen=True)
class Document:
    gid: str
    id: str
    data_src: str
    category: str
    title: str
    content: str
    desc: str
    others: str


def make_gid(data_src: str, own_id: str, content: str) -> str:
    """128 bits over source, the record's own id if it has one, and content: the same whatever the order of arrival.

    64 bits would meet by chance at some 10^10 documents; 128 do not.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (data_src, own_id, content):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def to_document(
    record: Mapping[str, Any],
    data_src: str,
    place: str,
    category: str = "",
    fields: Mapping[str, str] | None = None,
) -> Document | None:
    """A record in our schema, or None if it holds no text. ``place`` names it where it has no id of its own."""
    chosen: dict[str, str] = {}
    for ours, usual in USUAL_NAMES.items():
        candidates = (fields[ours],) if fields and ours in fields else usual
        name = next((name for name in candidates if _is_text(record.get(name), ours)), None)
        if name is not None:
            chosen[ours] = name
    if "content" not in chosen:
        return None
    text = {ours: _clean(str(record[name])) for ours, name in chosen.items()}
    rest = {key: value for key, value in record.items() if key not in chosen.values() and value not in (None, "")}
    return Document(
        gid=make_gid(data_src, text.get("id", ""), text["content"]),
        id=text.get("id") or _clean(place),
        data_src=data_src,
        category=text.get("category") or category,
        title=text.get("title", ""),
        content=text["content"],
        desc=text.get("desc", ""),
        others=_clean(json.dumps(rest, ensure_ascii=False, sort_keys=True, default=str)) if rest else "",
    )


def _is_text(value: Any, ours: str) -> bool:
    if ours == "id" and isinstance(value, int):
        return True
    return isinstance(value, str) and bool(value.strip())


def _clean(text: str) -> str:
    """JSON may hold halves of surrogate pairs, which no UTF-8 file can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
