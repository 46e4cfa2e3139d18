"""README in two languages: short, in a fixed order, and true where the code can tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS
from tests.test_docs import PAGES, headings, prose

ROOT = Path(__file__).parents[1]
READMES = ("README.md", "README.zh-CN.md")
MAX_LINES, MAX_WORDS = 200, 1100
# Only README and docs/status.md say it, so that one edit is enough on the day it is no longer true.
NOT_ON_A_GPU = re.compile(
    r"(not|never|no|none)\b[^.|;:]{0,60}\b(run|ran|measured|tested|timed|trained)\b[^.|;:]{0,20}\bon (a |any )?GPUs?\b"
    r"|(没有|未)[^。|；：]{0,12}在[^。|；：]{0,6}GPU[^。|；：]{0,14}(跑过|测过|测量过|实测过|训练过|运行过)",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", READMES)
def test_readme_is_short(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert len(text.split()) <= MAX_WORDS


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


def test_one_sentence_says_that_no_gpu_was_used() -> None:
    found = [page for page in PAGES if page != "CHANGELOG.md" and NOT_ON_A_GPU.search(" ".join(prose(page).split()))]
    assert found == [*READMES]
    assert "What has never run" in [text for _, text in headings("docs/status.md")]
