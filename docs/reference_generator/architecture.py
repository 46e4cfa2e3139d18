"""The layers of packages, from the import contract in pyproject.toml, as a table and as a drawing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any

CODE = re.compile(r"`([\w-]+)/?`")
WIDTH, ROW, GAP, BOX, MARGIN = 720, 44, 12, 150, 24
DATA = {"corpus", "tokenizer", "tokens", "storyworld"}
TRAINING = {"model", "parallel", "optim", "train", "checkpoint", "cluster"}
COLOURS = {"data": "#0072b2", "training": "#d55e00", "other": "#666"}


def package_layers(pyproject: dict[str, Any]) -> list[list[str]]:
    """The packages of each layer, from the highest."""
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    [ordered] = [one["layers"] for one in contracts if one.get("containers") == ["zero2all"]]
    return [layer.split(" | ") for layer in ordered]


def layer_numbers(layers: list[list[str]]) -> dict[str, int]:
    return {name: number for number, layer in enumerate(reversed(layers)) for name in layer}


def numbered(table: str, numbers: dict[str, int]) -> str:
    """The rows of a table that begin with a layer and a package, with the layer as it is now."""

    def row(line: str) -> str:
        names = CODE.findall(line.split("|")[2]) if re.match(r"\| \d+ ", line) else []
        return re.sub(r"^\| \d+ ", f"| {numbers[names[0]]} ", line) if names else line

    return "\n".join(map(row, table.splitlines())) + "\n"


def layers_svg(layers: list[list[str]]) -> str:
    """A row for each layer. An import goes from a row to one below it."""
    height = 2 * MARGIN + ROW * len(layers)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="ui-monospace, monospace" font-size="14">\n'
        f"<title>Packages by layer: each imports only from rows below</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n'
        f'<path d="M{MARGIN} {MARGIN}V{height - MARGIN - 8}" stroke="#888"/>'
        f'<path d="M{MARGIN - 5} {height - MARGIN - 8}h10l-5 8z" fill="#888"/>\n'
        f'<text x="{MARGIN + 14}" y="{MARGIN - 6}" fill="#666" font-size="12">imports go down</text>\n'
        + "\n".join(box for row, names in enumerate(layers) for box in _row(row, names))
        + "\n</svg>\n"
    )


def _row(row: int, names: list[str]) -> Iterator[str]:
    width = len(names) * BOX + (len(names) - 1) * GAP
    left, top = MARGIN + (WIDTH - MARGIN - width) / 2, MARGIN + row * ROW + 4
    for number, name in enumerate(names):
        x = left + number * (BOX + GAP)
        colour = COLOURS["data" if name in DATA else "training" if name in TRAINING else "other"]
        yield (
            f'<rect x="{x:.0f}" y="{top}" width="{BOX}" height="{ROW - 12}" rx="4" fill="{colour}" fill-opacity="0.12" '
            f'stroke="{colour}"/><text x="{x + BOX / 2:.0f}" y="{top + 21}" text-anchor="middle" fill="#222">'
            f"{escape(name)}</text>"
        )
