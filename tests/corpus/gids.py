"""The gid of one document."""

from __future__ import annotations

from zero2all.corpus.document import gid_maker


def make_gid(source: str, own_id: str, content: str) -> str:
    return gid_maker(source)(own_id.encode(), content.encode())
