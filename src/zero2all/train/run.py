"""A run directory, from which the run can be rebuilt: recipe, identity, environment, tokenizer, record, checkpoints."""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from zero2all import __version__
from zero2all.errors import RecipeError, UsageError, Z2aError
from zero2all.io import atomic_path, read_json, write_json, write_text
from zero2all.model import Z2all
from zero2all.paths import to_path
from zero2all.recipe import ModelConfig, Recipe, load_recipe, recipe_yaml
from zero2all.resilience import Checkpoints, flash_directory
from zero2all.resilience.checkpoint import STATE
from zero2all.resilience.lineage import read_line
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.train.plan import Plan

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Run:
    """
    >>> run = Run.open("runs/quickstart")
    >>> model, tokenizer = run.load_model(), run.tokenizer()
    """

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.recipe, self.directory = recipe, directory
        options = recipe.checkpoint
        self.checkpoints = Checkpoints(options.dir or directory / "checkpoints", options.keep, options.keep_best)
        self.record_path = directory / "record.jsonl"

    @classmethod
    def open(cls, directory: str | Path) -> Run:
        """An existing run; ``directory`` may also be the one above it that holds every stage."""
        for candidate in (Path(directory), Path(directory) / "run"):
            if (candidate / "identity.json").exists():
                recipe = _own_recipe(candidate / "recipe.yaml")
                # Where it is now, not where it was made: a run may be moved, or opened from elsewhere.
                return cls(recipe.model_copy(update={"out": candidate.absolute().parent}), candidate)
        raise UsageError(f"no run in {directory}: it should hold what 'z2a train' writes")

    def write_down(self, identity: dict[str, Any], tokenizer: Tokenizer, device: torch.device) -> None:
        """All that is needed to rebuild the run, its tokenizer included: the one it came from may be trained anew.

        By the process that holds the run, at every start; so what killed ones left behind is removed here.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(self.directory / "recipe.yaml", recipe_yaml(_with_absolute_paths(self.recipe)))
        write_json(self.directory / "environment.json", environment(device))
        (self.directory / "tokenizer").mkdir(exist_ok=True)
        for path in tokenizer_files(tokenizer):
            write_text(self.directory / "tokenizer" / path.name, path.read_text(encoding="utf-8"))
        write_json(self.directory / "identity.json", identity)
        self.checkpoints.remove_leftovers()

    def claim_memory(self) -> Path:
        """Where states in memory go: its name is this run's alone, also after one with the same path was removed."""
        path = self.directory / "key"
        if self.memory is None:
            with atomic_path(path) as partial:
                partial.touch(mode=0o600)  # who knows the name could make that directory first
                partial.write_text(f"{secrets.token_hex(8)}\n", encoding="utf-8")
        with suppress(OSError):
            path.chmod(0o600)  # earlier versions let others read it
        assert self.memory is not None
        return self.memory

    @property
    def memory(self) -> Path | None:
        try:
            key = (self.directory / "key").read_text(encoding="utf-8").strip()
        except (FileNotFoundError, PermissionError):  # it is for the owner of the run
            return None
        return flash_directory(self.recipe.checkpoint.flash_dir, key)

    def identity(self) -> dict[str, Any]:
        """Fingerprints of what the run is made of: stages, tokenizer, model, optimizer."""
        path = self.directory / "identity.json"
        identity = read_json(path)
        if not isinstance(identity, dict) or not {"stages", "model"} <= set(identity):
            raise _damaged(path, "it does not describe a run")
        return identity

    def tokenizer(self) -> Tokenizer:
        """The run's own copy."""
        return Tokenizer(self.directory / "tokenizer")

    def plan(self) -> Plan:
        """What each step took, as long as the token store is the one it was trained on."""
        plan = Plan(self.recipe, TokenStore(self.recipe.tokens_dir, "train"))
        if plan.describe() != self.identity()["stages"]:
            raise Z2aError(
                f"{self.recipe.tokens_dir} has changed since this run: its batches cannot be rebuilt from it"
            )
        return plan

    def load_model(self, step: int | None = None) -> Z2all:
        """The weights of a checkpoint, by default the newest."""
        step = self.checkpoints.newest(read_line(self.directory)) if step is None else step
        if step is None or not self.checkpoints.is_whole(step):
            there = ", ".join(map(str, self.checkpoints.steps())) or "none"
            raise Z2aError(f"no checkpoint {'' if step is None else step} in {self.directory}; steps there: {there}")
        config = self._config(step)
        with torch.device("meta"):
            model = Z2all(config)
        model = model.to_empty(device="cpu").prepare()
        self.checkpoints.load_model(step, model)
        return model.eval()

    def _config(self, step: int) -> ModelConfig:
        path = self.directory / "identity.json"
        try:
            config = ModelConfig.model_validate(self.identity()["model"])
            # A stage may have changed the rotary positions since the run began.
            path = self.checkpoints.path(step) / STATE
            rope = self.checkpoints.state(step)["rope"]
            return ModelConfig.model_validate({**config.model_dump(mode="json"), **rope})
        except ValidationError as error:
            first = error.errors()[0]
            raise _damaged(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        except (KeyError, TypeError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _own_recipe(path: Path) -> Recipe:
    """The recipe that a run wrote down of itself."""
    try:
        recipe = load_recipe(path)
    except RecipeError as error:
        raise _damaged(path, str(error.problems[0])) from error
    if not path.read_text(encoding="utf-8").strip():
        raise _damaged(path, "it is empty")
    return recipe


def _damaged(path: Path, reason: str) -> Z2aError:
    return Z2aError(f"{path} is damaged ({reason}): restore it from a copy of the run, or train again (out=DIR)")


def tokenizer_files(tokenizer: Tokenizer) -> list[Path]:
    """What a tokenizer directory has of the files that Hugging Face knows: not every one has a template for chats."""
    return [path for name in TOKENIZER_FILES if (path := tokenizer.directory / name).exists()]


def model_config(recipe: Recipe, tokenizer: Tokenizer) -> ModelConfig:
    """The recipe's shape with the vocabulary that the tokenizer needs."""
    config = recipe.model
    if config.vocab_size is None:
        return config.model_copy(update={"vocab_size": tokenizer.vocab_size})
    if config.vocab_size < tokenizer.vocab_size:
        raise UsageError(
            f"model.vocab_size is {config.vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens"
        )
    return config


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """A section's own directory by its full path, so that the recipe means the same from anywhere."""
    values = recipe.model_dump(mode="json")
    values["out"] = str(recipe.out.absolute())
    for section in ("corpus", "tokenizer", "tokens", "checkpoint"):
        if values[section]["dir"] is not None:
            values[section]["dir"] = str(to_path(values[section]["dir"]).absolute())
    return Recipe.model_validate(values)


def environment(device: torch.device) -> dict[str, Any]:
    """What a person needs to know to believe or repeat a figure."""
    return {
        "zero2all": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "changed_files": len(git("status", "--porcelain").splitlines()),
        }
    except (OSError, subprocess.SubprocessError):
        return None
