"""Make the images in docs/images from real runs: ``python docs/make_pictures.py``.

It makes images that are missing or stale, or those that are named. The runs stay in ``runs/pictures`` (``--work``), so
only the first call takes long. It needs the extra ``dev``, ``pip install pyte pillow``, and Chromium with its driver
(Debian: chromium chromium-driver fonts-noto-cjk). Look at every image before you commit it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from picture_maker.pictures import IMAGES, KEY, PICTURES, ROOT, Drawing, PageShot, Picture, stored_fingerprint
from picture_maker.runs import FIRST, Runs
from zero2all.base.console import say


def make(picture: Picture, runs: Runs) -> None:
    path = ROOT / IMAGES / picture.name
    if path.suffix == ".svg":
        text = draw(picture, runs)
        marked = re.sub(r"(<svg[^>]*>)", rf"\1<!-- {KEY} {picture.fingerprint()} -->", text, count=1)
        path.parent.mkdir(exist_ok=True)
        path.write_text(marked, encoding="utf-8", newline="\n")
        return
    from PIL.PngImagePlugin import PngInfo

    from picture_maker.screenshots import file_image, page_image

    if isinstance(picture, PageShot):
        runs.quickstart()
        image = page_image(picture, runs.work / FIRST / "run")
    else:
        image = file_image(runs.corpus_report(), 1100, 960)
    info = PngInfo()
    info.add_text(KEY, picture.fingerprint())
    image.save(path, optimize=True, pnginfo=info)


def draw(picture: Picture, runs: Runs) -> str:
    if isinstance(picture, Drawing):
        from picture_maker.explain import explain_svg

        return explain_svg(Path(picture.name).name)
    from picture_maker.terminal_svg import terminal_svg

    return terminal_svg(runs.quickstart())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(picture.name for picture in PICTURES)], metavar="NAME")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "pictures", help="directory of the runs")
    given = parser.parse_args()
    runs = Runs(given.work)
    for picture in PICTURES:
        path = ROOT / IMAGES / picture.name
        current = path.exists() and stored_fingerprint(path) == picture.fingerprint()
        if picture.name in given.names or not (given.names or current):
            make(picture, runs)
            say(f"{picture.name}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
