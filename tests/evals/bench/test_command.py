"""``z2a eval bench`` with a small model: the printed numbers are those of its logits."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.evals.bench.fakes import write_benchmarks
from tests.runs import wide_model
from zero2all.cli.main import app
from zero2all.evals import EvalTarget, open_target
from zero2all.model.hf import export_hf
from zero2all.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model_directory(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "hf"
    shutil.copytree(workspace / "tokenizer", directory)
    tokenizer = Tokenizer(directory)
    export_hf(wide_model(vocab_size=tokenizer.vocab_size), directory, tokenizer.stop_token_ids)
    return directory


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["eval", "bench", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def nats(target: EvalTarget, context: str, continuation: str) -> float:
    """By a forward pass over all of it."""
    before = [target.tokenizer.eos_token_id, *target.tokenizer.encode(context)]
    whole = [target.tokenizer.eos_token_id, *target.tokenizer.encode(context + continuation)]
    with torch.no_grad():
        logprobs = target.model(torch.tensor([whole]))[0].double().log_softmax(-1)
    return -sum(logprobs[place - 1, whole[place]].item() for place in range(len(before), len(whole)))


def test_the_command_reports_what_the_model_computes(model_directory: Path, tmp_path: Path) -> None:
    data = write_benchmarks(tmp_path)
    report = json.loads(run(model_directory, "arc_easy", "gsm8k", "--data", data, "--shots", "1", "--json"))
    arc, gsm8k = report["results"]
    assert (arc["task"], arc["form"], arc["items"], gsm8k["items"]) == ("arc_easy", "cloze", 3, 7)
    example = "Question: Colour 0?\nAnswer: blue\n\n"
    target = open_target(str(model_directory))
    scores = [
        [nats(target, f"{example}Question: Colour {n}?\nAnswer:", f" {one}") for one in ("red", "blue", "green")]
        for n in (1, 2, 3)
    ]
    bits = sum(row[1] for row in scores) / math.log(2) / (3 * len(" blue"))
    assert arc["answer_bits_per_byte"]["value"] == pytest.approx(bits, abs=1e-4)
    assert arc["accuracy"]["value"] == pytest.approx(sum(row[1] == min(row) for row in scores) / 3)
    text = run(model_directory, "arc_easy", "--data", data, "--mutate", "--limit", "2")
    assert re.search(r"arc_easy +letter +original +stem-swapped +centered_accuracy", text)


def test_mistakes_are_found_before_a_model_is_read(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["eval", "bench", "runs/none", "--data", str(tmp_path)])
    assert done.exit_code == 2
    assert "--data" in done.output
    write_benchmarks(tmp_path)
    done = CliRunner().invoke(app, ["eval", "bench", "runs/none", "--data", str(tmp_path), "--form", "letters"])
    assert done.exit_code == 2
    assert "--form letters: one of cloze, letter, cot" in done.output
