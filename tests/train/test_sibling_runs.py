"""Runs that share the documents, tokenizer and tokens of a workspace: ``z2a train RECIPE --name NAME``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.train.commands import refused, z2a
from zero2all.base.errors import UsageError
from zero2all.checkpoint.lock import run_lock
from zero2all.cluster.launch.launcher import node_counts
from zero2all.train import Run


def test_the_refusal_of_another_model_says_how_to_train_it_beside(out: Path, recipe: Path) -> None:
    message = refused("train", recipe, "model.num_hidden_layers=1")
    assert "model.num_hidden_layers=2, not 1" in message
    [command] = re.findall(r"'z2a (train RECIPE --name NAME)', with the same overrides", message)
    words = command.replace("RECIPE", str(recipe)).replace("NAME", "shallow").split()
    z2a(*words, "model.num_hidden_layers=1")
    shallow = Run.open(out / "shallow")
    assert (shallow.recipe.name, shallow.recipe.run, shallow.recipe.out) == ("shallow", "shallow", out)
    assert shallow.load_model(2).config.num_hidden_layers == 1
    assert Run.open(out).load_model(2).config.num_hidden_layers == 2
    assert not (out / "shallow" / "documents").exists()
    assert z2a("train", recipe, "model.num_hidden_layers=1", "train.steps=3", "--name", "shallow")
    assert shallow.checkpoints.steps()[-1] == 3  # resumed
    assert "not 1" not in refused("train", recipe, "--name", "shallow")
    assert "model.num_hidden_layers=1, not 2" in refused("train", recipe, "--name", "shallow")


@pytest.mark.parametrize("given", ["", "run"])
def test_a_sibling_inherits_the_recipe_of_the_run_that_is_given(given: str, out: Path) -> None:
    z2a("train", out / given, "seed=5", "train.steps=1", "--name", "lr/second")
    second = yaml.safe_load((out / "lr" / "second" / "recipe.yaml").read_text(encoding="utf-8"))
    first = yaml.safe_load((out / "run" / "recipe.yaml").read_text(encoding="utf-8"))
    changed = {"name": "lr/second", "run": "lr/second", "seed": 5, "out": str(out)}  # where the first is now
    assert second == {**first, **changed, "train": {**first["train"], "steps": 1}}
    z2a("train", out / "lr" / "second", "seed=6", "train.steps=1", "--name", "third")
    assert Run.open(out / "third").recipe.seed == 6


def test_every_command_takes_the_directory_of_a_sibling(out: Path, recipe: Path) -> None:
    shutil.move(out / "run", out / "spare")
    z2a("train", recipe, "--name", "a/b")
    shutil.rmtree(out / "spare")
    z2a("train", recipe, "train.steps=1", "--name", "c")
    run = out / "a" / "b"
    commands = [
        ["chat", run, "--prompt", "a", "max_tokens=2"], ["eval", "loss", run], ["export", run, "--to", out / "hf"],
        ["watch", run, "--once"], ["watch", run, "--html", out / "report.html"],
        ["ckpt", "ls", run], ["ckpt", "verify", run], ["blame", run, "--step", 1, "--no-loss"],
        ["blame", run, "--step", 1],
    ]  # fmt: skip
    for words in commands:
        assert z2a(*words)
        if words[0] != "watch":
            message = refused(*(out if word == run else word for word in words))
            assert message == f"no run in {out} itself; give one of those below: {run}, {out / 'c'}", words
    assert f"give one of the runs below it: {run}, {out / 'c'}" in refused("train", out, "--name", "d")


def test_siblings_never_share_a_checkpoint_directory(out: Path, recipe: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    z2a("train", recipe, f"checkpoint.dir={shared}", "--name", "run", "seed=9", f"out={tmp_path / 'other'}",
        f"tokens.dir={out / 'tokens'}", f"tokenizer.dir={out / 'tokenizer'}")  # fmt: skip
    assert [path.name for path in shared.iterdir()] == ["step-00000002"]  # as without a name
    z2a("train", tmp_path / "other", "model.num_hidden_layers=1", "--name", "lr/shallow")
    assert {path.name for path in shared.iterdir()} == {"step-00000002", "lr"}
    assert Run.open(tmp_path / "other").load_model().config.num_hidden_layers == 2
    assert Run.open(tmp_path / "other" / "lr" / "shallow").load_model().config.num_hidden_layers == 1
    for name in ("step-00000003", "lr/step-3", "checkpoints"):
        assert "which names the output of a stage or a checkpoint" in refused("train", recipe, "--name", name)


def test_a_run_is_neither_inside_another_nor_in_the_output_of_a_stage(out: Path, recipe: Path) -> None:
    assert "one inside the other: choose another name (--name" in refused("train", recipe, "--name", "run/x")
    z2a("train", recipe, "train.steps=1", "--name", "a/b")
    assert "one inside the other" in refused("train", recipe, "--name", "a")
    z2a("export", out, "--to", out / "hf")
    assert "holds the output of another command" in refused("train", recipe, "--name", "hf")
    assert not (out / "hf" / "lock").exists()


def test_a_damaged_or_locked_run_can_be_trained_beside(
    out: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out / "run" / "recipe.yaml").write_text("model: [", encoding="utf-8")
    message = refused("ckpt", "ls", out)
    assert "train another run on the same tokens ('z2a train RECIPE --name NAME'" in message
    with run_lock(out / "run"):
        monkeypatch.setattr("zero2all.checkpoint.lock.LOCK_PATIENCE", 0.1)
        assert "('z2a train RECIPE --name NAME', with the same overrides)" in refused("train", recipe)
        z2a("train", recipe, "train.steps=1", "--name", "second")


def test_all_missing_stages_are_named_at_once(out: Path, recipe: Path) -> None:
    with pytest.raises(UsageError, match="no run in"):
        Run.open(out / "none")
    shutil.rmtree(out / "tokens")
    assert refused("train", recipe) == f"no tokens in {out}/tokens: make them with 'z2a tokens build RECIPE'"
    shutil.rmtree(out / "tokenizer")
    message = refused("train", recipe, "evals.every=1 steps")
    assert message.startswith(f"no tokenizer in {out}/tokenizer, no tokens in {out}/tokens: make them with ")
    for command in re.findall(r"'z2a ([^']+) RECIPE'", message):
        z2a(*command.split(), recipe)
    z2a("train", recipe)
    message = refused("train", recipe, f"out={out}/new")
    assert "'z2a corpus build RECIPE', then 'z2a tokenizer train RECIPE', then 'z2a tokens build RECIPE'" in message
    assert "set tokenizer.dir and tokens.dir" in message
    z2a("train", recipe, f"out={out}/new", f"tokenizer.dir={out}/tokenizer", f"tokens.dir={out}/tokens")


def test_the_launcher_reads_the_recipe_of_a_command_with_a_name(recipe: Path) -> None:
    layout = ["parallel.tp=2", "parallel.dp_replicate=2"]
    assert node_counts(["train", str(recipe), *layout], 2, (1, 3)) == (2,)
    assert node_counts(["train", str(recipe), "--name", "deeper", *layout], 2, (1, 3)) == (2,)
