"""What a run was trained with is not replaced; the refusal has the commands that train on something else."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.commands import refused, z2a
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import sha256_file
from zero2all.quickstart import _refuse_other_recipe, quickstart_recipe
from zero2all.recipe import load_recipe, recipe_yaml
from zero2all.tokenizer import train_tokenizer
from zero2all.train import Run

ONE_WORKER = ["--workers", "1"]
WITH_WORKERS = (["corpus", "build"], ["tokenizer", "train"])


def printed_commands(message: str, name: str) -> Iterator[list[str]]:
    for line in message.splitlines()[1:]:
        words = shlex.split(line.replace("NAME", name))
        yield [*words[1:], *(ONE_WORKER if words[1:3] in WITH_WORKERS else [])]


def test_a_tokenizer_of_a_run_is_not_replaced(out: Path, recipe: Path) -> None:
    before = sha256_file(out / "tokenizer" / "tokenizer.json")
    message = refused("tokenizer", "train", recipe, "tokenizer.vocab_size=576", *ONE_WORKER)
    assert message.startswith(f"{out}/tokenizer is the tokenizer of {out}/run and is not replaced. To train on another")
    assert not (out / "tokenizer.work").exists()  # it was refused before anything was counted
    commands = list(printed_commands(message, "small"))
    assert [words[: words.index(str(recipe)) + 1] for words in commands] == [
        ["tokenizer", "train", str(recipe)], ["tokens", "build", str(recipe)], ["train", str(recipe)]
    ]  # fmt: skip
    for words in commands:
        z2a(*words)
    assert Run.open(out / "small").tokenizer().vocab_size == 576
    assert sha256_file(out / "tokenizer" / "tokenizer.json") == before
    z2a("train", recipe, "train.steps=3")  # the first run is resumed
    assert "tokenizer-3" in refused("tokenizer", "train", recipe, "tokenizer.vocab_size=640", *ONE_WORKER)


def test_only_another_tokenizer_counts(out: Path, recipe: Path, tmp_path: Path) -> None:
    def refuse() -> None:
        raise Z2aError("replaced")

    loaded = load_recipe(recipe)
    manifest = json.loads((out / "documents" / "manifest.json").read_text())
    (out / "documents" / "manifest.json").write_text(json.dumps({**manifest, "key": "files were touched"}))
    trained = train_tokenizer(loaded.tokenizer, loaded.documents_dir, out / "tokenizer", before_replace=refuse)
    assert not trained.reused
    other = loaded.tokenizer.model_copy(update={"min_frequency": 10_000})
    with pytest.raises(Z2aError, match="replaced"):
        train_tokenizer(other, loaded.documents_dir, out / "tokenizer", before_replace=refuse)
    assert train_tokenizer(loaded.tokenizer, loaded.documents_dir, out / "tokenizer").reused
    text = tmp_path / "text.txt"
    text.write_text("new words and more words")
    message = refused("tokenizer", "extend", out / "tokenizer", "--text", text, "--add", 4, "--out", out / "tokenizer")
    assert message.endswith(f"is the tokenizer of {out}/run and is not replaced: choose another --out")
    shutil.rmtree(out / "run")
    z2a("tokenizer", "extend", out / "tokenizer", "--text", text, "--add", 4, "--out", out / "tokenizer")


def test_tokens_of_a_run_are_not_replaced_by_those_of_other_documents(out: Path, recipe: Path) -> None:
    built = z2a("corpus", "build", recipe, "corpus.holdout=0.3", *ONE_WORKER)
    assert f"warning: the tokens of {out}/run are of the documents that these replace" in built
    message = refused("tokens", "build", recipe)
    assert message.startswith(f"{out}/tokens has the tokens of {out}/run and is not replaced. To train on another")
    for words in printed_commands(message, "second"):
        z2a(*words)
    assert Run.open(out / "second").recipe.tokens_dir == out / "tokens-2"
    for run in ("run", "second"):
        z2a("blame", out / run, "--step", 1, "--no-loss")
    message = refused("tokens", "build", recipe, f"out={out.parent}/elsewhere", f"tokens.dir={out}/tokens",
                      f"tokenizer.dir={out}/tokenizer", f"corpus.dir={out}/documents")  # fmt: skip
    assert f"has the tokens of {out}/run " in message
    shutil.rmtree(out / "run")
    z2a("tokens", "build", recipe)  # nobody needs the old ones


def test_tokens_of_a_run_are_verified_again_and_repaired(out: Path, recipe: Path) -> None:
    z2a("tokens", "build", recipe, "tokens.verify=0.5")
    [shard] = (out / "tokens" / "train").glob("en-*.bin")
    before = shard.read_bytes()
    shard.write_bytes(b"x" + before[1:])
    z2a("tokens", "build", recipe)
    assert shard.read_bytes() == before
    built = z2a("corpus", "build", recipe, *ONE_WORKER)  # the same documents
    assert "warning: the tokens" not in built


def test_a_quickstart_of_another_model_is_trained_beside(tmp_path: Path) -> None:
    out, text = tmp_path / "first", tmp_path / "text"
    text.mkdir()
    out.mkdir()
    (out / "recipe.yaml").write_text(recipe_yaml(quickstart_recipe(out, [text], ["seed=1"])), encoding="utf-8")

    def remedy(*overrides: str) -> str:
        other = quickstart_recipe(out, [text], list(overrides))
        with pytest.raises(UsageError) as refusal:
            _refuse_other_recipe(other, out / "recipe.yaml", list(overrides))
        return str(refusal.value).partition("; ")[2]

    command = f"z2a train {out} seed=1 'model={{preset: z2all-3m}}' --name NAME"
    assert f"same tokens: {command}; or choose another --out" in remedy("seed=1", "model={preset: z2all-3m}")
    for override in ("tokenizer.vocab_size=512", "corpus.holdout=0.5"):
        assert remedy("model.num_hidden_layers=1", override) == "choose another --out, or remove that directory"
