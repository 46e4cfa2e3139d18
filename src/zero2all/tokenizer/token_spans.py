"""``z2a tokenizer inspect``: a text split into its tokens, for a terminal and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO

from rich.console import Console
from rich.text import Text

from zero2all.base.charts.page import html_page
from zero2all.base.charts.plot import tint
from zero2all.tokenizer.tokenizer import Tokenizer

COLOURS = [tint(number) for number in range(6)]
BLANKS = str.maketrans({" ": "·", "\t": "→", "\n": "⏎\n", "\r": "␍"})
STYLE = """
pre { font: 15px/2 ui-monospace, "Noto Sans Mono CJK SC", monospace }
span { border-radius: 3px; padding: 2px 0; color: #222 } .special { outline: 2px solid #ef4444 }
"""


@dataclass(frozen=True)
class TokenSpan:
    id: int
    data: bytes
    special: bool

    @property
    def display_text(self) -> str:
        """The token as text; bytes of a character that spans several tokens, and control characters, as ``\\xe6``."""
        text = self.data.decode("utf-8", "backslashreplace").translate(BLANKS)
        return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def token_spans(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[TokenSpan]:
    """The tokens of a text; with ``special`` the names of special tokens in it are parsed as special tokens."""
    table, specials = tokenizer.token_bytes, set(tokenizer.special_ids.values())
    ids = tokenizer.encode(text, allow_special="all" if special else "none")
    return [TokenSpan(id, table[id], id in specials) for id in ids]


def render_terminal(tokens: Sequence[TokenSpan], *, colour: bool) -> str:
    """Tokens in alternating colours, or separated by bars without colour."""
    if not colour:
        return "|".join(token.display_text for token in tokens)
    text = Text()
    for number, token in enumerate(tokens):
        style = f"black on {COLOURS[number % len(COLOURS)]}" + (" bold underline" if token.special else "")
        text.append(token.display_text, style)
    out = StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor", soft_wrap=True).print(text)
    return out.getvalue()


def render_html(tokens: Sequence[TokenSpan], title: str) -> str:
    """One page without scripts; the id and the bytes of a token show when the pointer is over it."""
    spans = []
    for number, token in enumerate(tokens):
        about = f"{token.id}: {token.data.hex(' ')}"
        special = ' class="special"' if token.special else ""
        colour = COLOURS[number % len(COLOURS)]
        spans.append(f'<span{special} style="background:{colour}" title="{about}">{escape(token.display_text)}</span>')
    body = f"<h1>{escape(title)}</h1><p>{escape(summary(tokens))}</p><pre>{''.join(spans)}</pre>"
    return html_page(title, body, STYLE)


def summary(tokens: Sequence[TokenSpan]) -> str:
    size = sum(len(token.data) for token in tokens)
    return f"{len(tokens)} tokens, {size} bytes, {size / max(1, len(tokens)):.2f} bytes per token"
