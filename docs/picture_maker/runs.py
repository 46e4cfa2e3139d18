"""The runs that the images show. Each is made once in a working directory, and again if its recipe or code changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import yaml

from picture_maker.pictures import CORPUS_PAGE, PRINTED, ROOT, STORIES, Picture
from picture_maker.recording import Recording, record
from zero2all.base.console import say

Z2A = str(Path(sys.executable).with_name("z2a"))
FIRST = "runs/first"
CORPUS = "runs/mixed"


class Runs:
    """Runs below ``work``; commands run there, so that the paths they print are short."""

    def __init__(self, work: Path) -> None:
        self.work = work.absolute()
        self.work.mkdir(parents=True, exist_ok=True)

    def quickstart(self) -> Recording:
        """``z2a quickstart`` in a terminal: what it printed."""
        path = self.work / "quickstart.cast"

        def make() -> None:
            shutil.rmtree(self.work / "runs", ignore_errors=True)
            for other in self.work.glob("*.made"):
                other.unlink()
            record([Z2A, "quickstart", "--out", FIRST], self.work).save(path)

        self._once("quickstart", (*STORIES, *PRINTED), make)
        return Recording.load(path)

    def corpus_report(self) -> Path:
        """The report of text that every machine has: stories, Python's library and notices of installed packages."""
        self.quickstart()
        page = self.work / "corpus.html"

        def make() -> None:
            (self.work / "mixed.yaml").write_text(yaml.safe_dump(_mixed_recipe(self.work)), encoding="utf-8")
            self._z2a("corpus", "build", "mixed.yaml")
            self._z2a("corpus", "report", f"{CORPUS}/documents", "--html", page.name)

        self._once("corpus", CORPUS_PAGE, make)
        return page

    def _once(self, name: str, sources: tuple[str, ...], make: Callable[[], None]) -> None:
        mark, fingerprint = self.work / f"{name}.made", Picture(name, sources).fingerprint(ROOT)
        if mark.exists() and mark.read_text() == fingerprint:
            return
        say(f"{name} …")
        make()
        mark.write_text(fingerprint)

    def _z2a(self, *words: str) -> None:
        subprocess.run([Z2A, *words], cwd=self.work, check=True)


def _mixed_recipe(work: Path) -> dict[str, object]:
    library, installed = sysconfig.get_path("stdlib"), Path(yaml.__file__).parents[1]
    sources = {
        "stories": [f"{work / FIRST}/stories/*.jsonl"],
        "code": [f"{library}/*.py", f"{library}/[a-r]*/*.py"],
        "notices": [f"{installed}/*.dist-info/METADATA", f"{installed}/*.dist-info/**/LICENSE*"],
    }
    listed = [{"name": name, "paths": globs} for name, globs in sources.items()]
    return {"name": "mixed", "out": CORPUS, "corpus": {"sources": listed, "holdout": 0.02}}
