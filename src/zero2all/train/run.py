"""A run directory: recipe.yaml, environment.json, record.jsonl, checkpoints/. A run can be rebuilt from it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from zero2all import __version__
from zero2all.errors import UsageError, Z2aError
from zero2all.io import write_json, write_text
from zero2all.model import Z2all
from zero2all.recipe import ModelConfig, Recipe, load_recipe, recipe_yaml
from zero2all.resilience import Checkpoints
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import Samples, TokenStore


class Run:
    """
    >>> run = Run.open("runs/quickstart/run")
    >>> model, tokenizer = run.load_model(), run.tokenizer()
    """

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.recipe, self.directory = recipe, directory
        self.checkpoints = Checkpoints(directory / "checkpoints", recipe.checkpoint.keep)
        self.record_path = directory / "record.jsonl"

    @classmethod
    def create(cls, recipe: Recipe, device: torch.device) -> Run:
        """Make the directory, or take up the run that is in it."""
        run = cls(recipe, recipe.run_dir)
        run.directory.mkdir(parents=True, exist_ok=True)
        write_text(run.directory / "recipe.yaml", recipe_yaml(recipe))
        write_json(run.directory / "environment.json", environment(device))
        return run

    @classmethod
    def open(cls, directory: str | Path) -> Run:
        """An existing run; ``DIR`` may also be the directory above it that holds every stage."""
        directory = Path(directory)
        for candidate in (directory, directory / "run"):
            if (candidate / "environment.json").exists():
                return cls(load_recipe(candidate / "recipe.yaml"), candidate)
        raise UsageError(f"no run in {directory}: it should hold what 'z2a train' writes")

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.recipe.tokenizer_dir)

    def samples(self) -> Samples:
        """The training samples in the order of this run."""
        store = TokenStore(self.recipe.tokens_dir, "train")
        return Samples(store, self.recipe.train.seq_len, seed=self.recipe.seed, mixture=self.recipe.train.mixture)

    def model_config(self, tokenizer: Tokenizer) -> ModelConfig:
        """The recipe's shape with the vocabulary that the tokenizer needs."""
        config = self.recipe.model
        if config.vocab_size is None:
            return config.model_copy(update={"vocab_size": tokenizer.vocab_size})
        if config.vocab_size < tokenizer.vocab_size:
            raise UsageError(
                f"model.vocab_size is {config.vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens"
            )
        return config

    def load_model(self, step: int | None = None) -> Z2all:
        """The weights of a checkpoint, by default the newest."""
        step = self.checkpoints.newest() if step is None else step
        if step is None or step not in self.checkpoints.steps():
            there = ", ".join(map(str, self.checkpoints.steps())) or "none"
            raise Z2aError(f"no checkpoint {'' if step is None else step} in {self.directory}; steps there: {there}")
        with torch.device("meta"):
            model = Z2all(self.model_config(self.tokenizer()))
        model = model.to_empty(device="cpu").init_weights(seed=0)
        self.checkpoints.load_model(step, model)
        return model.eval()


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
