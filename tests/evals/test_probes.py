"""Probes: their values are those of plain forward passes, suites are checked, and a run's values become curves."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import wide_model
from zero2all.base.errors import RecipeError, UsageError
from zero2all.evals.probe_suite import ProbeSuite, builtin_suites, load_suite
from zero2all.evals.probes import ProbeResult, evaluate_probes, evaluate_suite, format_probes
from zero2all.model import Z2all
from zero2all.tokenizer import Tokenizer
from zero2all.track.run_locations import EVALS_FILE
from zero2all.train import Run

SUITE = """
name: own
probes:
  - {name: right, kind: continuation, language: en, category: facts, prompt: the model, continuation: " reads",
     alternatives: [" writes", " a line"]}
  - {name: alone, kind: continuation, language: en, category: facts, prompt: say what, continuation: " comes next"}
  - {name: text, kind: sentence, language: zh, category: fluency, text: 白日依山尽}
  - {name: order, kind: contrast, language: en, category: grammar, better: small steps make long roads,
     worse: steps roads make small long}
  - {name: json, kind: instruction, language: en, category: asked, prompt: give me JSON, continuation: "{",
     alternatives: [Sure]}
  - {name: wrong, kind: continuation, language: en, category: facts, prompt: the model, continuation: " sleeps",
     expect: fall}
"""


@pytest.fixture
def suite(tmp_path: Path) -> ProbeSuite:
    path = tmp_path / "own.yaml"
    path.write_text(SUITE, encoding="utf-8")
    return load_suite(path)


@torch.no_grad()
def nats(model: Z2all, context: list[int], continuation: list[int]) -> float:
    logits = model(torch.tensor([[*context, *continuation]]))[0].log_softmax(-1)
    return -sum(float(logits[len(context) - 1 + place, token]) for place, token in enumerate(continuation))


def by_name(results: list[ProbeResult]) -> dict[str, ProbeResult]:
    return {result.name: result for result in results}


def test_values_are_those_of_plain_forward_passes(suite: ProbeSuite, workspace: Path) -> None:
    tokenizer = Tokenizer(workspace / "tokenizer")
    model, end, encode = wide_model(vocab_size=tokenizer.vocab_size), [tokenizer.eos_token_id], tokenizer.encode
    found = by_name(evaluate_suite(model, tokenizer, suite))

    def text_nats(text: str) -> float:
        return nats(model, end, encode(text))

    # P(ending | prompt) is P(prompt and ending) over P(prompt), so among endings only the full texts matter.
    right, *others = (math.exp(-text_nats("the model" + ending)) for ending in (" reads", " writes", " a line"))
    assert found["right"].value == pytest.approx(right / (right + sum(others)), rel=1e-3)
    prompt = encode("say what")
    assert encode("say what comes next")[: len(prompt)] == prompt
    rest = encode("say what comes next")[len(prompt) :]
    assert found["alone"].value == pytest.approx(math.exp(-nats(model, [*end, *prompt], rest)), rel=1e-3)
    bits = text_nats("白日依山尽") / math.log(2)
    assert found["text"].value == pytest.approx(bits / 15, rel=1e-4)
    tokens = len(encode("白日依山尽"))
    assert found["text"].perplexity == pytest.approx(2 ** (bits / tokens), rel=1e-3)
    per_byte = [
        text_nats(text) / math.log(2) / len(text)
        for text in ("small steps make long roads", "steps roads make small long")
    ]
    assert found["order"].value == pytest.approx(per_byte[1] - per_byte[0], abs=1e-4)
    expected = {"right": "rise", "alone": "rise", "text": "fall", "order": "rise", "json": "rise", "wrong": "fall"}
    assert {name: result.expected for name, result in found.items()} == expected


@pytest.mark.parametrize("has_template", [True, False])
def test_an_instruction_is_a_message_where_there_is_a_chat_template(
    has_template: bool, suite: ProbeSuite, workspace: Path
) -> None:
    tokenizer = Tokenizer(workspace / "tokenizer")
    asked = next(probe for probe in suite.probes if probe.name == "json")
    if not has_template:
        tokenizer.chat_template = None
        first, _ = asked.requests(tokenizer)
        assert tokenizer.decode(first.context[1:] + first.continuation) == "give me JSON\n{"
        return
    assert tokenizer.chat_template is not None
    prompt = tokenizer.render_chat([{"role": "user", "content": "give me JSON"}], add_generation_prompt=True)
    assert [list(request.context) for request in asked.requests(tokenizer)] == [prompt, prompt]
    assert [tokenizer.decode(request.continuation) for request in asked.requests(tokenizer)] == ["{", "Sure"]


def test_the_package_has_probes_of_both_languages_and_all_kinds(workspace: Path) -> None:
    suites = [load_suite(name) for name in builtin_suites()]
    general = [probe for suite in suites if suite.name != "stories" for probe in suite.probes]
    languages = Counter(probe.language for probe in general)
    assert languages["zh"] >= 80
    assert languages["en"] >= 80
    kinds = Counter(probe.kind for probe in general)
    assert min(kinds[kind] for kind in ("continuation", "sentence", "contrast", "instruction")) >= 15
    stories = next(suite for suite in suites if suite.name == "stories")
    assert {probe.language for probe in stories.probes} == {"zh", "en"}
    assert len(stories.probes) >= 20
    tokenizer = Tokenizer(workspace / "tokenizer")
    for suite in suites:
        for probe in suite.probes:
            for request in probe.requests(tokenizer):
                assert request.continuation, f"{suite.name}: {probe.name}"


MISTAKES = [
    ("name: x\nprobes: []", "line 2, probes: "),
    ("name: x\nprobes:\n  - {name: a, kind: riddle}", "line 3, probes.0: kind must be one of continuation"),
    ("name: x\nprobes:\n  - name: a\n    language: en\n    kind: sentence\n    category: c\n    txt: b",
     "line 7, probes.0.txt: no such key"),
    ("name: x\nprobes:\n  - name: a\n    language: en\n    kind: sentence\n    category: c\n    text: 5",
     "line 7, probes.0.text: .* quotes"),
    ("name: x\nprobes:\n  - {name: a, kind: sentence, language: en, category: c, text: b}\n"
     "  - {name: a, kind: sentence, language: en, category: c, text: d}", "a is there twice"),
    ("name: x\nprobes:\n  - {name: a, kind: continuation, language: en, category: c, prompt: p, continuation: q,"
     " alternatives: [q]}", "line 3, .*must differ"),
    ("name: x\nprobes:\n  - {name: a/b, kind: sentence, language: en, category: c, text: b}", "line 3, probes.0.name"),
    ("name: x", "probes: is required"),
    ("- a", "must be a mapping"),
    ("name: !!python/object/apply:os.system [id]", "not plain YAML"),
    ("a: &a [x, x]\nb: &b [*a, *a]\n" + "".join(f"{chr(98 + n)}x: &{chr(98 + n)}x [" + ", ".join(
        [f"*{chr(97 + n)}x" if n else "*b"] * 30) + "]\n" for n in range(4)), "more than"),
    ("[" * 10_000, "nested|not plain"),
    ("x" * (2**20 + 1), "larger than"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_wrong_suite_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_suite(path)


def test_all_mistakes_of_a_suite_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text("name: x y\nprobes:\n  - {name: a, kind: sentence, language: english, category: c, text: ''}")
    with pytest.raises(RecipeError) as caught:
        load_suite(path)
    assert [(one.line, one.path) for one in caught.value.problems] == [
        (1, "name"), (3, "probes.0.language"), (3, "probes.0.text")
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"no suite of probes at nowhere: .* english"):
        load_suite("nowhere")


@pytest.fixture
def run(three_checkpoints: Run, tmp_path: Path) -> Run:
    return Run.open(shutil.copytree(three_checkpoints.directory, tmp_path / "run"))


def test_the_checkpoints_of_a_run_become_curves(run: Run, suite: ProbeSuite) -> None:
    for step in (1, 2):
        report = evaluate_probes(str(run.checkpoints.path(step)), [suite])
    assert [curve.steps for curve in report.curves] == [[1, 2]] * 6
    report = evaluate_probes(str(run.directory), [suite])
    assert [curve.steps for curve in report.curves] == [[1, 2, 3]] * 6
    assert report.recorded
    for curve in report.curves:
        model = by_name(evaluate_suite(run.load_model(3), run.tokenizer(), suite))[curve.name]
        assert curve.values[-1] == pytest.approx(model.value)
        assert curve.tau is not None
        assert curve.p is not None
    text = format_probes(report)
    assert "6 probes, 3 checkpoints (1 to 3 steps)" in text
    assert "need at least 6 checkpoints" in text


def test_a_run_that_cannot_be_written_is_evaluated_all_the_same(
    run: Run, suite: ProbeSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("zero2all.evals.probes.append_evals", refuse)
    report = evaluate_probes(str(run.directory), [suite])
    assert not report.recorded
    assert report.curves[0].steps == [3]


def test_the_command_prints_values_and_json(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zero2all.cli.main import app

    path = tmp_path / "own.yaml"
    path.write_text(SUITE, encoding="utf-8")
    for words in (["--json"], []):
        app(["eval", "probes", str(run.directory), "--suite", str(path), *words], standalone_mode=False)
    printed, text = capsys.readouterr().out.split("\n", 1)
    report = json.loads(printed)
    assert report["step"] == 3
    assert len(report["results"]) == 6
    assert "suite own: 6 probes" in text
    assert "perplexity" in text
    checkpoint = run.checkpoints.path(2)
    app(["eval", "probes", str(checkpoint), "--suite", str(path)], standalone_mode=False)
    assert "2 checkpoints (2 to 3 steps)" in capsys.readouterr().out
    lines = [json.loads(line) for line in (run.directory / EVALS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [3] * 12 + [2] * 6
