"""Tokens to text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import AnyStr


class TextStream:
    """The text of tokens as they arrive. What may still change is held back: the bytes of an incomplete character,
    and what may become a stop string.

    >>> stream = TextStream(tokenizer.token_bytes, stop=["\\n\\n"])
    >>> [stream.push([id]) for id in tokenizer.encode("一\\n\\n二")], stream.stopped
    (['', '一', ''], True)
    """

    def __init__(self, token_bytes: Sequence[bytes], stop: Iterable[str] = ()) -> None:
        self._token_bytes = token_bytes
        # Bytes match where text does: UTF-8 has no character inside another.
        self._stops = [text.encode("utf-8", "surrogatepass") for text in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self.stopped = False

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is certain now. At a stop string ``stopped`` is set, and this is the rest before it."""
        self._held += b"".join([self._token_bytes[token] for token in tokens])
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            self._held = self._held[: min(places)]
            return self.finish()
        split = len(self._held) - max((overlap(self._held, stop) for stop in self._stops), default=0)
        certain, self._held = self._held[:split], self._held[split:]
        return self._decoder.decode(certain)

    def finish(self) -> str:
        """The rest, with U+FFFD for an incomplete character."""
        rest, self._held = self._held, b""
        return self._decoder.decode(rest, final=True)


def overlap(text: AnyStr, stop: AnyStr) -> int:
    """How many of the last bytes or characters are the beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
