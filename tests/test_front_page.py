"""README in two languages: short, in a fixed order, and true where the code can tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from benchmarks.gpu_report import SECTIONS

from tests.chaos.faults import FAULTS
from tests.test_docs import PAGES, headings, prose
from zero2all.base.workspace import MAX_DEPTH
from zero2all.recipe import OptimizerRecipe, TrainRecipe, builtin_recipe_path, load_recipe

ROOT = Path(__file__).parents[1]
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
READMES = ("README.md", "README.zh-CN.md")
MAX_LINES, MAX_WORDS = 200, 1100
CHINESE, CHARACTERS_PER_WORD = r"[\u4e00-\u9fff]", 1.6
BETWEEN_WORDS = rf"{CHINESE}|[\u3000-\u303f\uff00-\uffef]|\]\([^)]*\)"  # and punctuation, and targets of links
# Only README and docs/evidence/status.md say it, so that one edit is enough on the day it is no longer true.
NOT_ON_A_GPU = re.compile(
    r"(not|never|no|none)\b[^.|;:]{0,60}\b(run|ran|measured|tested|timed|trained)\b[^.|;:]{0,20}\bon (a |any )?GPUs?\b"
    r"|\bno GPU (has|run)\b|\bnever run\.|\bnot (yet|measured|tested|run)\b[^.|;]{0,12}\bneeds? (a )?GPUs?\b"
    r"|(没有|未)[^。|；：]{0,12}在[^。|；：]{0,6}GPU[^。|；：]{0,14}(跑过|测过|测量过|实测过|训练过|运行过)"
    r"|GPU[^。|；]{0,12}(没有|还没|尚未|未)(实际)?(测|跑|运行|计时)|(没有|还没|尚未|未)(实际)?(测|跑|运行)[^。|]{0,4}GPU",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", READMES)
def test_readme_is_short(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    words = len(re.sub(BETWEEN_WORDS, " ", text).split()) + len(re.findall(CHINESE, text)) / CHARACTERS_PER_WORD
    assert words <= MAX_WORDS


@pytest.mark.parametrize("page", READMES)
def test_every_claim_links_to_its_proof(page: str) -> None:
    claims = re.findall(r"^\d\. \*\*.*?(?=^\d\. |^## )", prose(page), re.MULTILINE | re.DOTALL)
    assert len(claims) == 4
    for claim in claims:
        assert re.search(r"\*(Proof:|证据：)\*\s*\[[^]]+\]\([^)]+\)", claim), claim


@pytest.mark.parametrize("page", READMES)
def test_the_number_of_faults_is_the_suite_s(page: str) -> None:
    [count] = re.findall(r"`python -m tests\.chaos` (?:injects|注入) (\d+)", prose(page))
    assert int(count) == len(FAULTS)


@pytest.mark.parametrize("page", READMES)
def test_the_gpu_script_takes_at_most_as_long_as_stated(page: str) -> None:
    [minutes] = re.findall(r"at most (\d+) minutes|最多 (\d+) 分钟", prose(page))
    assert int("".join(minutes)) * 60 == sum(SECTIONS.values())


@pytest.mark.parametrize(
    ("page", "row"),
    [("docs/evidence/comparison.md", "Training precision"), ("docs/evidence/comparison.zh-CN.md", "训练精度")],
)
def test_the_comparison_lists_the_precisions_of_a_recipe(page: str, row: str) -> None:
    [cell] = re.findall(rf"^\| {row} \| ([^|]+) \|", prose(page), re.MULTILINE)
    accepted = {*get_args(get_type_hints(TrainRecipe)["precision"]), "float8"} - {"auto"}
    assert {*re.split("[,、] ?", cell)} == accepted


@pytest.mark.parametrize(
    ("page", "default", "own_text"),
    [
        (
            "docs/contribute/architecture.md",
            "**{} is the default** of `train.optimizer`, and the quickstart uses it",
            " uses {}.",
        ),
        ("docs/contribute/architecture.zh-CN.md", "**默认是 {}。** quickstart 用的也是它", " 用 {}。"),
    ],
)
def test_optimizers_of_the_quickstart(page: str, default: str, own_text: str) -> None:
    text = " ".join(prose(page).split())
    stories, own = (load_recipe(builtin_recipe_path(name)).train for name in ("stories.yaml", "quickstart.yaml"))
    assert stories.optimizer.name == OptimizerRecipe().name
    assert default.format(OPTIMIZERS[stories.optimizer.name]) in text
    assert "`z2a quickstart --corpus`" + own_text.format(OPTIMIZERS[own.optimizer.name]) in text


@pytest.mark.parametrize(
    ("page", "words"),
    [("docs/how-to/watch/page.md", "up to four levels"), ("docs/how-to/watch/page.zh-CN.md", "最多四层")],
)
def test_the_depth_at_which_runs_are_found(page: str, words: str) -> None:
    assert words in (ROOT / page).read_text(encoding="utf-8")
    assert MAX_DEPTH == 4


def test_one_sentence_says_that_no_gpu_was_used() -> None:
    recipes = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/**/*.yaml"))
    texts = {page: prose(page).replace("\n#", " ") for page in (*PAGES, *recipes) if page != "CHANGELOG.md"}
    assert [page for page, text in texts.items() if NOT_ON_A_GPU.search(" ".join(text.split()))] == [*READMES]
    assert "What has never run" in [text for _, text in headings("docs/evidence/status.md")]
