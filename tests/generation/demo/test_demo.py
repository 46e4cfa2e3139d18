"""The model of ``z2a chat --demo``: its files, its answers, and that its script still makes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.demo_model import CHAT_OVERRIDES, OVERRIDES, DemoRecord, make_demo
from typer.testing import CliRunner

from zero2all.base.io import MANIFEST, read_json_object
from zero2all.base.manifest import all_files, checksums
from zero2all.base.records import parse_record
from zero2all.cli.main import app
from zero2all.evals import open_target
from zero2all.generation import SamplingParams
from zero2all.generation.demo import DIRECTORY, QUESTIONS
from zero2all.generation.serve import ChatSession

MAX_BYTES = 8_000_000
SCRIPTS = {"en": re.compile(r"[A-Za-z]"), "zh": re.compile(r"[\u4e00-\u9fff]")}


def _manifest() -> dict[str, Any]:
    return read_json_object(DIRECTORY / MANIFEST)


def _record() -> DemoRecord:
    return parse_record(DemoRecord, _manifest()["demo"], DIRECTORY / MANIFEST)


def test_the_files_are_small_and_match_their_checksums() -> None:
    files = all_files(DIRECTORY)
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {path.suffix for path in files} == {".json", ".jinja", ".safetensors", ".md", ".svg"}, "no pickle"
    assert _manifest()["files"] == checksums(DIRECTORY)


def test_the_record_is_of_the_recipe_in_the_script() -> None:
    record = _record()
    assert (record.overrides, record.chat_overrides) == (OVERRIDES, CHAT_OVERRIDES)
    assert all(f"train.precision={record.precision}" in one for one in (OVERRIDES, CHAT_OVERRIDES))


def test_it_answers_in_the_language_of_the_question() -> None:
    target = open_target(str(DIRECTORY))
    for question, (language, other) in zip(QUESTIONS, (("en", "zh"), ("zh", "en")), strict=True):
        session = ChatSession(target.model, target.tokenizer, SamplingParams(max_tokens=300, temperature=0.0))
        answer = "".join(session.answer(question))
        assert len(SCRIPTS[language].findall(answer)) > 20, answer
        assert not SCRIPTS[other].search(answer)
        assert session.stats is not None
        assert session.stats.finish_reason == "stop"


def test_a_target_or_the_demo_must_be_given() -> None:
    for words in ([], ["runs/first", "--demo"]):
        done = CliRunner().invoke(app, ["chat", *words])
        assert done.exit_code == 2
        assert "or --demo" in done.stderr


@pytest.mark.long
def test_the_script_makes_a_model_as_good(tmp_path: Path) -> None:
    made, shipped = make_demo(tmp_path / "work", tmp_path / "model"), _record()
    assert made.bits_per_byte == pytest.approx(shipped.bits_per_byte, rel=0.01)
    assert made.base_bits_per_byte == pytest.approx(shipped.base_bits_per_byte, rel=0.01)
