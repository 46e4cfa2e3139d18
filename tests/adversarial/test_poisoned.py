"""Every command that takes a path is given every poisoned thing: nothing in it runs, and no error is called a bug."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.adversarial.poisoned import ARTIFACTS
from tests.conftest import tiny_recipe
from zero2all.cli.main import app
from zero2all.export import export_run
from zero2all.train import Run, train

# TARGET is the poisoned thing, OUT a new directory, RECIPE a recipe that is fine.
COMMANDS: dict[str, list[str]] = {
    "train": ["train", "TARGET"],
    "train from it": ["train", "RECIPE", "train.init=TARGET", "train.steps=1", "out=OUT"],
    "train on its tokens": ["train", "RECIPE", "tokens.dir=TARGET", "train.steps=1", "out=OUT"],
    "train with its tokenizer": ["tokens", "build", "RECIPE", "tokenizer.dir=TARGET", "tokens.dir=OUT"],
    "plan": ["plan", "TARGET"],
    "plan here": ["plan", "TARGET", "--gpu", "here"],
    "compare": ["compare", "TARGET", "TARGET"],
    "chat --prompt": ["chat", "TARGET", "--prompt", "a", "max_tokens=1"],
    "chat": ["chat", "TARGET"],
    "serve": ["serve", "TARGET", "--port", "0"],
    "export": ["export", "TARGET", "--to", "OUT"],
    "watch": ["watch", "TARGET", "--once"],
    "watch --html": ["watch", "TARGET", "--html", "OUT"],
    "blame": ["blame", "TARGET", "--step", "0"],
    "recipe show": ["recipe", "show", "TARGET"],
    "recipe check": ["recipe", "check", "TARGET"],
    "recipe check of weights": ["recipe", "check", "RECIPE", "train.init=TARGET"],
    "corpus sniff": ["corpus", "sniff", "TARGET"],
    "corpus build": ["corpus", "build", "RECIPE", 'corpus.sources=[{name: a, paths: ["TARGET"]}]', "corpus.dir=OUT"],
    "corpus report": ["corpus", "report", "TARGET"],
    "corpus export": ["corpus", "export", "TARGET", "--to", "OUT"],
    "tokenizer import": ["tokenizer", "import", "TARGET", "--out", "OUT"],
    "tokenizer eval": ["tokenizer", "eval", "TARGET", "--text", "RECIPE"],
    "tokenizer inspect": ["tokenizer", "inspect", "TARGET", "some text"],
    "tokenizer extend": ["tokenizer", "extend", "TARGET", "--text", "RECIPE", "--add", "1", "--out", "OUT"],
    "tokenizer export": ["tokenizer", "export", "TARGET", "--to", "OUT"],
    "blame --no-loss": ["blame", "TARGET", "--step", "0", "--no-loss"],
    "ckpt ls": ["ckpt", "ls", "TARGET"],
    "ckpt verify": ["ckpt", "verify", "TARGET"],
    "ckpt diff": ["ckpt", "diff", "TARGET", "1", "2"],
    "ckpt rm": ["ckpt", "rm", "TARGET", "1"],
    "eval loss": ["eval", "loss", "TARGET"],
    "eval probes": ["eval", "probes", "TARGET"],
    "eval report": ["eval", "report", "TARGET"],
}


@pytest.fixture(scope="module")
def exported(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A good Hugging Face directory of our own, and the recipe of its run."""
    out = tmp_path_factory.mktemp("good")
    recipe = tiny_recipe(workspace, f"out={out}/run", "train.steps=1", "checkpoint.every=1 steps")
    train(recipe)
    run = Run.open(recipe.run_dir)
    export_run(run, out / "hf", check=False)
    return out / "hf", run.directory / "recipe.yaml"


@pytest.fixture(scope="module")
def artifacts(exported: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("poisoned")
    (root / "things").mkdir()
    for number, make in enumerate(ARTIFACTS.values()):
        make(exported[0], root / "things" / f"{number}.gguf", root / "mark")
    return root / "things", root / "mark"


def test_a_payload_works_where_it_is_trusted(artifacts: tuple[Path, Path]) -> None:
    """Else the tests below would show nothing."""
    things, mark = artifacts
    torch.load(things / "0.gguf" / "pytorch_model.bin", weights_only=False)
    assert mark.exists()
    mark.rmdir()


def test_every_command_with_a_path_is_attacked() -> None:
    import click

    found: set[str] = set()

    def walk(node: click.Command, words: list[str]) -> None:
        if isinstance(node, click.Group):
            for name, inner in node.commands.items():
                walk(inner, [*words, name])
        elif any(isinstance(one, click.Argument) for one in node.params):
            found.add(" ".join(words))

    walk(typer.main.get_command(app), [])
    attacked = {" ".join(words[:2]) for words in COMMANDS.values()} | {words[0] for words in COMMANDS.values()}
    # They take a recipe, as train and plan do; a command line; addresses; or are as the one beside them.
    others = {
        "bench profile", "tokens inspect", "tokenizer train", "tokens build",
        "bench loader", "bench ops", "bench shapes", "bench checkpoint", "launch", "quickstart", "corpus fetch",
        "eval bench", "eval watch", "eval lm-eval", "eval stories", "corpus generate",
    }  # fmt: skip
    assert found - attacked - others == set()


def pairs() -> list[Any]:
    """Every pair. The gate takes every command once, with one thing after the other; the rest is long."""
    return [
        pytest.param(name, thing, marks=[] if (number - other) % len(ARTIFACTS) == 0 else [pytest.mark.long])
        for number, name in enumerate(COMMANDS)
        for other, thing in enumerate(ARTIFACTS)
    ]


@pytest.mark.parametrize(("name", "thing"), pairs())
def test_a_command_runs_nothing_of_what_it_is_given(
    name: str, thing: str, artifacts: tuple[Path, Path], exported: tuple[Path, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    things, mark = artifacts
    monkeypatch.setattr("zero2all.track.http_server.serve", lambda *_: None)  # it would serve until Ctrl-C
    target = things / f"{list(ARTIFACTS).index(thing)}.gguf"
    places = {"TARGET": str(target), "OUT": str(tmp_path / "out"), "RECIPE": str(exported[1])}
    words = COMMANDS[name]
    for placeholder, value in places.items():
        words = [word.replace(placeholder, value) for word in words]
    done = CliRunner().invoke(app, words, input="hello\n")
    assert not mark.exists(), "code has run"
    assert done.exit_code in (0, 1, 2), done.output
    assert "this is a bug" not in done.output, done.output[-3000:]
    assert "Traceback" not in done.output
