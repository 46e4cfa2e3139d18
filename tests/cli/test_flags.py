"""Flags of commands: each changes what the command does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.main import get_command
from typer.testing import CliRunner

from zero2all.cli.main import app
from zero2all.corpus.filters.quality_classifier import load_quality_model
from zero2all.train import Run


def z2a(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def run(tiny_run: Run) -> Path:
    return tiny_run.directory


def test_export_in_bf16(run: Path, tmp_path: Path) -> None:
    dtypes = {}
    for name, flags in (("fp32", []), ("bf16", ["--dtype", "bf16"])):
        done = z2a("export", run, "--to", tmp_path / name, *flags)
        assert done.exit_code == 0, done.output
        weights = load_file(tmp_path / name / "model.safetensors")
        dtypes[name] = {weight.dtype for weight in weights.values()}
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == {
            "fp32": "float32", "bf16": "bfloat16",
        }[name]  # fmt: skip
    assert dtypes == {"fp32": {torch.float32}, "bf16": {torch.bfloat16}}


def test_watch_in_the_terminal_ends_with_the_run(run: Path) -> None:
    done = z2a("watch", "--tty", run)
    assert done.exit_code == 0, done.output
    assert any(0x2800 < ord(character) <= 0x28FF for character in done.output), "a chart in braille"


def test_quality_classifier_from_good_and_bad_files(tmp_path: Path) -> None:
    texts = {
        "good": [f"The old man sat by the door and told the children story number {n}." for n in range(30)],
        "bad": [f"BUY NOW!!! cheap pills {n} www.spam{n}.cn !!! click {n}" for n in range(30)],
    }
    for kind, lines in texts.items():
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    files = ["--good", tmp_path / "good.jsonl", "--bad", tmp_path / "bad.jsonl"]
    done = z2a("corpus", "quality", "train", *files, "--out", tmp_path / "model")
    assert done.exit_code == 0, done.output
    model = load_quality_model(tmp_path / "model")
    assert model.score("BUY NOW!!! cheap pills www.spam77.cn") < 0.5 < model.score("The children sat by the old door.")


def completions(run: Path, *words: object) -> list[dict[str, Any]]:
    done = z2a("chat", run, "--json", *words)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["completions"]
    return found


def test_generate_completes_every_prompt_of_a_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the model\n从前\n", encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the model"}\n{"prompt": "从前"}\n', encoding="utf-8")
    lines, objects = (
        completions(run, "--prompts", tmp_path / name, "--num-samples", 2, "max_tokens=8")
        for name in ("prompts.txt", "prompts.jsonl")
    )
    assert lines == objects
    assert [completion["prompt"] for completion in lines] == ["the model", "the model", "从前", "从前"]
    assert len({tuple(completion["tokens"]) for completion in lines}) == 4
    assert {completion["finish_reason"] for completion in lines} <= {"length", "stop"}
    [alone] = completions(run, "--prompt", "the model", "max_tokens=8")
    assert alone["tokens"] == lines[0]["tokens"]
    shown = z2a("chat", run, "--prompts", tmp_path / "prompts.txt", "max_tokens=8").stdout
    assert shown.index(lines[0]["prompt"] + lines[0]["text"]) < shown.index(lines[2]["prompt"] + lines[2]["text"])


def test_flags_of_generate_change_the_text(run: Path) -> None:
    [plain] = completions(run, "--prompt", "the", "max_tokens=20")
    [greedy] = completions(run, "--prompt", "the", "max_tokens=20", "temperature=0")
    for flags in ("top_k=1", "top_p=1e-6", "min_p=1"):
        assert completions(run, "--prompt", "the", "max_tokens=20", flags)[0]["tokens"] == greedy["tokens"]
    assert plain["tokens"] != greedy["tokens"]
    assert completions(run, "--prompt", "the", "max_tokens=20", "seed=1")[0]["tokens"] != plain["tokens"]
    [varied] = completions(run, "--prompt", "the", "max_tokens=20", "repetition_penalty=1e6")
    assert len(set(varied["tokens"])) == 20
    stop = [character for character in plain["text"] if character.isalnum()][3]
    [stopped] = completions(run, "--prompt", "the", "max_tokens=20", "stop=never", f"stop={stop}")
    assert (stopped["text"], stopped["finish_reason"]) == (plain["text"][: plain["text"].index(stop)], "stop")


def test_generate_streams_on_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def sanitize(text: str) -> str:
        written.append(text)
        return text

    monkeypatch.setattr("zero2all.cli.chat._stdout_is_terminal", lambda: True)
    monkeypatch.setattr("zero2all.cli.chat.sanitize", sanitize)
    shown = z2a("chat", run, "--prompt", "the", "max_tokens=20").stdout
    [completion] = completions(run, "--prompt", "the", "max_tokens=20")
    assert shown == "the" + completion["text"] + "\n"
    assert len(written) > 10
    assert "".join(written) == "the" + completion["text"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompts", "nowhere.txt"], "no file at nowhere.txt"),
        (["--prompts", "empty.txt"], "must have a prompt on each line"),
        (["--prompts", "wrong.jsonl"], "cannot read"),
        (["--prompts", "wrong.jsonl", "--prompt", "a"], "not both"),
        (["top_p=0"], "top_p must be"),
        (["stop="], "stop must be"),
        (["top_p=high"], "top_p must be a number"),
        (["top-p=1"], "write NAME=VALUE, with one of max_tokens, temperature"),
    ],
    ids=str,
)
def test_wrong_flags_of_generate_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("wrong.jsonl").write_text('{"text": "the"}\n')
    done = z2a("chat", run.absolute(), *(flags if flags[0].startswith("--prompt") else ["--prompt", "", *flags]))
    assert done.exit_code == 2
    assert said in done.output


def options_of(command: Any, path: str = "") -> dict[str, set[str]]:
    """All options by command, such as ``bench comm``."""
    if not hasattr(command, "commands"):
        return {path: {name for option in command.params for name in option.opts}}
    found: dict[str, set[str]] = {}
    for name, below in command.commands.items():
        found |= options_of(below, f"{path} {name}".strip())
    return found


def test_the_number_of_gpus_has_one_name_in_every_command() -> None:
    options = options_of(get_command(app))
    with_gpus = {path for path, names in options.items() if "--gpus" in names}
    commands = {"plan", "compare"}
    assert with_gpus == commands | {"bench comm"}
    assert {path for path, names in options.items() if "--nproc-per-node" in names} == {"launch"}
    synonyms = {"--world", "--world-size", "--ranks", "--num-gpus", "--n-gpus", "--devices"}
    assert not {path for path, names in options.items() if names & synonyms}
