"""The Ray engine gives the same bytes as the local one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import write_raw
from tests.corpus.test_resume import contents, recipe_for
from zero2all.corpus import build_corpus

pytest.importorskip("ray")
DRIVER = """
import json, sys
from zero2all.corpus import build_corpus
from zero2all.engine import Engine
from zero2all.paths import to_path
from zero2all.recipe import CorpusRecipe

recipe = CorpusRecipe.model_validate(json.loads(sys.argv[1]))
build_corpus(recipe, to_path(sys.argv[2]), Engine(kind="ray", ray_address=sys.argv[3] or None))
"""


def driver(raw: Path, out: Path, address: str) -> list[str]:
    return [sys.executable, "-c", DRIVER, json.dumps(recipe_for(raw).model_dump(mode="json")), str(out), address]


@pytest.mark.slow
def test_ray_gives_the_bytes_of_the_local_engine(tmp_path: Path) -> None:
    write_raw(tmp_path / "raw")
    build_corpus(recipe_for(tmp_path / "raw"), tmp_path / "local")
    subprocess.run(driver(tmp_path / "raw", tmp_path / "ray", ""), check=True, timeout=240)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
