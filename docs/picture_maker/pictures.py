"""The images of the documentation: what each of them shows, and whether it is current.

An image stores a fingerprint of the recipe and the code that it shows. Changes to other code leave it current.
"""

from __future__ import annotations

import ast
import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
IMAGES = Path("docs", "images")
KEY = "z2a-fingerprint"
PNG_SIGNATURE = 8  # bytes before the first chunk

STORIES = ("recipes/stories.yaml", "src/zero2all/quickstart.py::STORIES_PER_LANGUAGE")
CORPUS_PAGE = (
    "src/zero2all/corpus/corpus_report.py",
    "src/zero2all/base/charts/page.py",
    "src/zero2all/base/charts/svg.py::sankey_svg",
    "src/zero2all/base/charts/plot.py::COLOURS",
)
PAGE = tuple(f"src/zero2all/track/page/{name}" for name in ("index.html", "app.css", "app.js"))
PRINTED = (
    "src/zero2all/quickstart.py::quickstart",
    "src/zero2all/quickstart.py::summary_text",
    "src/zero2all/track/step_text.py::FORMATS",
    "src/zero2all/track/step_text.py::step_line",
    "docs/picture_maker/terminal_svg.py",
)

# Conditions in the page: every chart in the window has its lines, the dialog has its table.
CHARTS_DRAWN = """(() => {
  const seen = (box) => box.bottom > 0 && box.top < innerHeight;
  const charts = [...document.querySelectorAll(".chart")].filter((chart) => seen(chart.getBoundingClientRect()));
  return charts.length && charts.every((chart) => chart.querySelector("canvas") && chart.querySelector(".legend b"));
})()"""
LOSSES_COMPUTED = "document.querySelector('dialog td') && !document.querySelector('dialog div > :is(button, small)')"


@dataclass(frozen=True)
class Picture:
    """An image, and the files, or definitions in a file (``path::name``), that it depends on."""

    name: str
    sources: tuple[str, ...]

    def fingerprint(self, root: Path = ROOT) -> str:
        parts = [repr(self), *(_source_text(root, source) for source in self.sources)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Drawing(Picture):
    """A picture of docs/explain, computed by the code that its page explains."""


@dataclass(frozen=True)
class PageShot(Picture):
    """The live page of a run, or only some of its charts."""

    view: str
    """The URL fragment."""
    width: int
    height: int
    phone: bool = False
    parts: tuple[str, ...] = ()
    """CSS selectors of what is shown; without them the whole window."""
    ready: str = CHARTS_DRAWN
    """True in the page when it can be taken."""


RUN = (*STORIES, *PAGE)
ENGLISH, DARK, CHINESE = "theme=light&lang=en", "theme=dark&lang=en", "theme=light&lang=zh"
EXPLAINED: dict[str, tuple[str, ...]] = {
    "bits-per-byte": ("storyworld/generate.py",),
    "checkpoint-interval": ("checkpoint/checkpoint_interval.py",),
    "fused-kernels": (),
    "gpu-links": ("base/machine/gpu_specs.toml",),
    "loss-normal": ("track/health_checks.py", "track/health_messages.toml"),
    "memory-anatomy": ("planner/rank_plan.py",),
    "mfu": ("model/cost/flops.py",),
    "packing": ("model/ops/attention.py::document_starts",),
    "parity": ("bench/parity_cases.py",),
    "pipelines": ("planner/pipeline.py",),
    "sample-order": ("tokens/sample_order.py",),
    "story-world": ("storyworld/teller.py", "storyworld/plots.py"),
    "three-walls": ("base/machine/gpu_specs.toml",),
    "threat-model": (),
    "torchrun": ("checkpoint/checkpoint_interval.py",),
    "zero": ("planner/plan.py::ZeroPaper",),
}
"""The page of each drawing, and the files below src/zero2all that it shows."""
MAKER = "docs/picture_maker"
DRAWN = (f"{MAKER}/explain_svg.py", f"{MAKER}/explain_runs.py", f"{MAKER}/explain_zh.toml")
DRAWINGS = tuple(
    Drawing(
        f"explain/{page}{language}.svg",
        (f"{MAKER}/explain.py::{page.replace('-', '_')}", *DRAWN, *(f"src/zero2all/{name}" for name in shown)),
    )
    for page, shown in EXPLAINED.items()
    for language in ("", ".zh-CN")
)
QUALITY = ("[data-chart='validation/*']", "[data-chart='stories/*']")
PICTURES: tuple[Picture, ...] = (
    Picture("quickstart.svg", (*STORIES, *PRINTED)),
    PageShot("track-light.png", RUN, ENGLISH, 1400, 910),
    PageShot("track-dark.png", RUN, DARK, 1400, 910),
    PageShot("track-zh.png", RUN, CHINESE, 1400, 910),
    PageShot("track-phone.png", RUN, DARK, 400, 860, phone=True),
    PageShot("track-time.png", RUN, ENGLISH, 800, 900, parts=("[data-chart='time/*']",)),
    PageShot("track-documents.png", RUN, f"{ENGLISH}&step=0:320", 1200, 760, ready=LOSSES_COMPUTED),
    PageShot("stories-quality.png", RUN, ENGLISH, 1280, 1200, parts=QUALITY),
    Picture("corpus-report.png", CORPUS_PAGE),
    *DRAWINGS,
)


def problems(root: Path = ROOT, pictures: Sequence[Picture] = PICTURES) -> list[str]:
    """Images that are missing, stale, not made by the script or shown on no page."""
    folder, known = root / IMAGES, {picture.name: picture for picture in pictures}
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    shown = set(re.findall(r"images/([\w./-]+)", "\n".join(_pages(root))))
    listed = [f"{name}: missing" for name in known if name not in found]
    for name, path in sorted(found.items()):
        if name not in known:
            listed.append(f"{name}: not made by docs/make_pictures.py")
        elif stored_fingerprint(path) != known[name].fingerprint(root):
            listed.append(f"{name}: stale; {' or '.join(known[name].sources)} changed")
        if name not in shown:
            listed.append(f"{name}: on no page")
    return listed


def stored_fingerprint(path: Path) -> str | None:
    """What ``make_pictures.py`` wrote into a PNG as text, or into an SVG as a comment."""
    data = path.read_bytes()
    if path.suffix == ".svg":
        match = re.search(rf"<!-- {KEY} (\w+) -->", data.decode())
        return match and match[1]
    texts = (body.split(b"\0", 1) for kind, body in _png_chunks(data) if kind == b"tEXt")
    return next((value.decode() for key, value in texts if key == KEY.encode()), None)


def _pages(root: Path) -> Iterator[str]:
    for path in (*root.glob("*.md"), *root.glob("docs/**/*.md")):
        yield path.read_text(encoding="utf-8")


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = PNG_SIGNATURE
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, data[at + 8 : at + 8 + length]
        at += length + 12  # length, kind and checksum


def _source_text(root: Path, source: str) -> str:
    path, _, name = source.partition("::")
    text = (root / path).read_text(encoding="utf-8")
    if name:
        text = _definition(text, name)
    if path.endswith(".js"):
        text = text.partition("*/")[2]  # the digest of the sources, with their comments
    if path.endswith(".yaml"):  # comments are not shown
        return repr(yaml.safe_load(text))
    if path.endswith(".py"):
        text = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return text


def _definition(text: str, name: str) -> str:
    node = next(node for node in ast.parse(text).body if name in _defined(node))
    return ast.get_source_segment(text, node) or ""


def _defined(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    named = [target.id for target in targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else named
