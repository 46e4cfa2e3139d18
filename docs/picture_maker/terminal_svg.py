"""Draws a recording of a terminal as an animated SVG: text and CSS, no scripts.

The text is what the command printed. Its times are compressed: pauses are shorter, and lines that were printed together
appear one after another. The screens stand side by side, and the animation moves from one to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from unicodedata import east_asian_width

import pyte
from pyte.screens import Char

from picture_maker.recording import Recording

SECONDS = 17.0  # of the animation
LAST = 5.0  # seconds for which the last screen stays
PAUSES = {"── sample 4": 3.0}  # seconds before a line that starts with this: the stories before it are in English
SHORTEST = 0.12  # seconds; changes closer than that share a screen
PRINTED_LINE, WAIT, LONGEST_WAIT = 1.0, 0.1, 5.0  # weights in the remaining time: of a line, of a second before it

CELL, LINE = 8.4, 19  # width of a column, height of a row
FONT, WIDE_FONT = 14, 16  # sizes; a Chinese character fills two columns
MARGIN, BAR = 16, 34  # around the text; height of the title bar
INK, PAPER, BAR_PAPER = "#d7dde8", "#10151f", "#1b2230"
COLOURS = {
    "black": "#10151f", "red": "#f87171", "green": "#4ade80", "brown": "#fbbf24", "blue": "#60a5fa",
    "magenta": "#c084fc", "cyan": "#22d3ee", "white": "#d7dde8", "brightblack": "#64748b",
}  # fmt: skip
FONTS = (
    "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Noto Sans Mono CJK SC','PingFang SC',"
    "'Microsoft YaHei','Noto Sans CJK SC',monospace"
)

Row = tuple[Char, ...]
Screen = tuple[Row, ...]


def terminal_svg(recording: Recording) -> str:
    screens = list(_timed_screens(recording))
    width = round(recording.columns * CELL + 2 * MARGIN)
    height = recording.rows * LINE + BAR + MARGIN
    drawn: dict[str, int] = {}  # rows that are the same on several screens are drawn once
    frames = []
    for number, (_, screen) in enumerate(screens):
        uses = []
        for at, row in enumerate(screen):
            if text := _row_svg(row):
                name = drawn.setdefault(text, len(drawn))
                uses.append(f'<use href="#r{name}" y="{at * LINE}"/>')
        frames.append(f'<g transform="translate({number * width})">{"".join(uses)}</g>')
    rows = "".join(f'<g id="r{name}">{text}</g>' for text, name in drawn.items())
    dots = "".join(
        f'<circle cx="{20 + 20 * place}" cy="17" r="6" fill="{colour}"/>'
        for place, colour in enumerate(("#f87171", "#fbbf24", "#4ade80"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{FONTS}" font-size="{FONT}" fill="{INK}" role="img"><title>{escape(recording.command)}</title>'
        f"<style>{_style([seconds for seconds, _ in screens], width)}</style><defs>{rows}</defs>"
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>'
        f'<path d="M0 {BAR}V10a10 10 0 0 1 10-10H{width - 10}a10 10 0 0 1 10 10V{BAR}z" fill="{BAR_PAPER}"/>{dots}'
        f'<svg x="{MARGIN}" y="{BAR + 6}" width="{width - MARGIN}" height="{height - BAR - 6}">'
        f'<g class="film">{"".join(frames)}</g></svg></svg>\n'
    )


def _style(durations: list[float], width: int) -> str:
    """Without animation, as for people who prefer reduced motion, the last screen is shown."""
    total, at, stops = sum(durations), 0.0, []
    for number, seconds in enumerate(durations):
        stops.append(f"{100 * at / total:.2f}%{{transform:translateX({-number * width}px)}}")
        at += seconds
    last = f"transform:translateX({-(len(durations) - 1) * width}px)"
    return (
        f"text{{white-space:pre}}.film{{{last};animation:play {total:.1f}s step-end infinite}}"
        f"@keyframes play{{{''.join(stops)}100%{{{last}}}}}"
        "@media(prefers-reduced-motion){.film{animation:none}}"
    )


def _timed_screens(recording: Recording) -> Iterator[tuple[float, Screen]]:
    """Each screen with the seconds for which it is shown."""
    screen = pyte.Screen(recording.columns, recording.rows)
    stream = pyte.Stream(screen)
    parts = list(_parts(recording))
    pauses = [next((seconds for start, seconds in PAUSES.items() if text.startswith(start)), 0.0) for _, text in parts]
    scale = (SECONDS - LAST - sum(pauses)) / sum(weight for weight, _ in parts)
    shown = 0.0
    for (weight, text), pause in zip(parts, pauses, strict=True):
        shown += weight * scale + pause
        if shown >= SHORTEST:
            yield shown, _snapshot(screen)
            shown = 0.0
        stream.feed(text)
    yield shown + LAST, _snapshot(screen)


def _parts(recording: Recording) -> Iterator[tuple[float, str]]:
    """What was printed, line by line, and its weight: how long the screen before it stays."""
    yield 0.0, "\x1b[1;32m$\x1b[0m "
    for word in recording.command.split():
        yield 2.0, f"{word} "
    yield 2.0, "\r\n"
    before = 0.0
    for seconds, text in recording.writes:
        wait = WAIT * min(seconds - before, LONGEST_WAIT)
        before = seconds
        for line in text.splitlines(keepends=True):
            yield wait + PRINTED_LINE * line.endswith("\n"), line
            wait = 0.0


def _snapshot(screen: pyte.Screen) -> Screen:
    return tuple(tuple(screen.buffer[row][column] for column in range(screen.columns)) for row in range(screen.lines))


def _row_svg(row: Row) -> str:
    """Text of one look in one element, as wide as its cells in whatever font there is."""
    cells = [(column, cell) for column, cell in enumerate(row) if cell.data]  # the second half of a wide one is empty
    texts = []
    for (colour, bold, wide), members in groupby(cells, lambda cell: _look(cell[1])):
        placed = list(members)
        text = "".join(cell.data for _, cell in placed)
        if not text.strip():
            continue
        left = placed[0][0]
        columns = len(placed) * (2 if wide else 1)
        look = (f' fill="{colour}"' if colour else "") + (' font-weight="700"' if bold else "")
        look += f' font-size="{WIDE_FONT}"' if wide else ""
        spacing = f' textLength="{columns * CELL:.1f}"'
        texts.append(f'<text x="{left * CELL:.1f}" y="{FONT}"{spacing}{look}>{escape(text)}</text>')
    return "".join(texts)


def _look(cell: Char) -> tuple[str | None, bool, bool]:
    """Colour, weight, and whether it fills two columns."""
    colour = COLOURS.get(cell.fg) or (None if cell.fg == "default" else f"#{cell.fg}")
    return colour, cell.bold, east_asian_width(cell.data[0]) in "WF"
