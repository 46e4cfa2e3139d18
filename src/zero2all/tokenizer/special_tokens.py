"""When text may be parsed as a special token."""

from __future__ import annotations

import re
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Literal

from zero2all.errors import UsageError, Z2aError

AllowSpecial = Literal["none", "raise", "all"] | AbstractSet[str]
"""What the text of a special token means: text; an error; the token; or the token if its name is in the set."""


def allowed_names(allow: AllowSpecial, names: Collection[str], texts: list[str]) -> frozenset[str]:
    """The special tokens that may be parsed in these texts."""
    if allow == "none":
        return frozenset()
    if allow == "all":
        return frozenset(names)
    if allow == "raise":
        for text in texts:
            if len(parts := split_special(text, frozenset(names))) > 1:
                raise Z2aError(
                    f"the text contains {parts[1]!r}, which is the name of a special token: "
                    "remove it, or encode it as text with allow_special='none'"
                )
        return frozenset()
    if isinstance(allow, str) or (unknown := set(allow) - set(names)):
        wrong = allow if isinstance(allow, str) else ", ".join(sorted(unknown))
        raise UsageError(f"allow_special is 'none', 'raise', 'all' or a set of special tokens, not {wrong!r}")
    return frozenset(allow)


def split_special(text: str, names: frozenset[str]) -> list[str]:
    """Text, name, text, name, ..., text: the texts have even indices and may be empty."""
    return _pattern(names).split(text) if names else [text]


@lru_cache(maxsize=64)
def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    # Longer names first, or one that begins another would hide it.
    return re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
