"""Every image of the documentation is current, and on a page. ``python docs/make_pictures.py`` makes them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from picture_maker.pictures import IMAGES, KEY, PICTURES, ROOT, Picture, problems

RECIPE = "train:\n  steps: 760\n"
CODE = "WIDTH = 3\n\ndef draw():\n    return WIDTH\n\ndef other():\n    return 1\n"
SHOWN = (Picture("curve.png", ("recipe.yaml", "page.py::draw")), Picture("film.svg", ("page.py",)))


def write_png(path: Path, fingerprint: str) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"tEXt", f"{KEY}\0{fingerprint}".encode()), (b"IDAT", zlib.compress(b"\0\0")))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in (*chunks, (b"IEND", b""))))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with one recipe, one module, two current images and a page that shows them."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "page.py").write_text(CODE)
    (tmp_path / IMAGES).mkdir(parents=True)
    (tmp_path / "README.md").write_text("![a curve](docs/images/curve.png) ![a film](docs/images/film.svg)\n")
    curve, film = SHOWN
    write_png(tmp_path / IMAGES / "curve.png", curve.fingerprint(tmp_path))
    (tmp_path / IMAGES / "film.svg").write_text(f"<svg><!-- {KEY} {film.fingerprint(tmp_path)} --></svg>")
    return tmp_path


def test_every_image_is_current_made_by_the_script_and_on_a_page() -> None:
    assert problems() == [], "run 'python docs/make_pictures.py', and look at what it made"


def test_images_load_fast() -> None:
    sizes = {picture.name: (ROOT / IMAGES / picture.name).stat().st_size for picture in PICTURES}
    assert {name: size for name, size in sizes.items() if size > (2**20 if name.endswith(".svg") else 250_000)} == {}


def edit(path: str, before: str, after: str) -> Callable[[Path], None]:
    return lambda tree: (tree / path).write_text((tree / path).read_text().replace(before, after)) and None


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (edit("recipe.yaml", "760", "800"), ["curve.png: stale"]),
        (edit("recipe.yaml", "760", "760  # longer"), []),
        (edit("page.py", "return WIDTH", "return 2 * WIDTH"), ["curve.png: stale", "film.svg: stale"]),
        (edit("page.py", "return 1", "return 2"), ["film.svg: stale"]),
        (edit("README.md", "film.svg", "gone.svg"), ["film.svg: on no page"]),
        (lambda tree: (tree / IMAGES / "film.svg").unlink(), ["film.svg: missing"]),
        (lambda tree: (tree / IMAGES / "film.svg").write_text("<svg></svg>"), ["film.svg: stale"]),
        (lambda tree: (tree / IMAGES / "hand.png").touch(), ["hand.png: not made", "hand.png: on no page"]),
    ],
)
def test_a_change_names_its_images(tree: Path, change: Callable[[Path], object], found: list[str]) -> None:
    assert problems(tree, SHOWN) == []
    change(tree)
    listed = problems(tree, SHOWN)
    assert len(listed) == len(found)
    assert all(line.startswith(start) for line, start in zip(listed, found, strict=True))
