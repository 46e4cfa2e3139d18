"""Screenshots of pages in Chromium, as PNG files with a palette."""

from __future__ import annotations

import base64
import io
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from tests.track.browser import browser, watching

from picture_maker.pictures import PageShot

SCALE = 2  # sharp on screens with small pixels
COLOURS = 256
MARGIN = 8  # around a part of a page
BOX = """
const boxes = arguments[0].map((part) => document.querySelector(part).getBoundingClientRect());
const left = Math.min(...boxes.map((box) => box.left)), top = Math.min(...boxes.map((box) => box.top));
const right = Math.max(...boxes.map((box) => box.right)), bottom = Math.max(...boxes.map((box) => box.bottom));
const margin = arguments[1];
return { x: left + scrollX - margin, y: top + scrollY - margin, scale: 1,
  width: right - left + 2 * margin, height: bottom - top + 2 * margin };
"""


def page_image(shot: PageShot, run: Path) -> Image.Image:
    """The live page, from ``z2a watch``."""
    with watching(run) as (url, _):
        return _screenshot(f"{url}#{shot.view}", shot)


def file_image(path: Path, width: int, height: int) -> Image.Image:
    """The top of an HTML file."""
    return _screenshot(path.absolute().as_uri(), PageShot(path.name, (), "", width, height, ready="true"))


def _screenshot(url: str, shot: PageShot) -> Image.Image:
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
        size = {"width": shot.width, "height": shot.height, "deviceScaleFactor": SCALE, "mobile": shot.phone}
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        page.get(url)
        if shot.parts:
            _wait(page, f'document.querySelector("{shot.parts[0]}")')
            page.execute_script(f'document.querySelector("{shot.parts[0]}").scrollIntoView({{block: "center"}})')
        _wait(page, shot.ready)
        page.execute_script("document.activeElement.blur()")  # nobody uses the keyboard
        if not shot.parts:
            return _reduced(page.get_screenshot_as_png())
        clip = page.execute_script(BOX, shot.parts, MARGIN)
        taken = page.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        return _reduced(base64.b64decode(taken["data"]))


def _wait(page: Any, condition: str) -> None:
    end = time.monotonic() + 120
    while not page.execute_script(f"return Boolean({condition})"):
        if time.monotonic() > end:
            raise SystemExit(f"never true on the page: {condition}")
        time.sleep(0.1)


def _reduced(png: bytes) -> Image.Image:
    """Few colours are enough for text and lines, and a third of the bytes."""
    return (
        Image.open(io.BytesIO(png))
        .convert("RGB")
        .quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
