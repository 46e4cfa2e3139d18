"""The run directory: recipe, identity, environment, tokenizer, record, checkpoints; enough to rebuild the run."""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from zero2all import __version__
from zero2all.base.console import say, warn
from zero2all.base.errors import RecipeError, UsageError, Z2aError
from zero2all.base.io import MANIFEST, atomic_path, read_record, write_json, write_record, write_text
from zero2all.base.machine.cpus import rank_binding
from zero2all.base.machine.devices import device_name, pick_device
from zero2all.base.paths import is_url, to_path
from zero2all.base.records import first_problem
from zero2all.base.workspace import (
    DEFAULT_RUN,
    IDENTITY_FILE,
    NEW_RUN_COMMAND,
    did_you_mean,
    find_runs_below,
    workspace_of,
)
from zero2all.checkpoint import CheckpointStore, InitialWeights, RunIdentity, flash_directory
from zero2all.checkpoint.checkpoint_directory import STATE_FILE
from zero2all.checkpoint.slot_directories import KEY_FILE, SHM_DIRECTORY, read_key
from zero2all.checkpoint.training_state import read_lineage
from zero2all.model import Z2all
from zero2all.parallel import ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe, Recipe, load_recipe, recipe_yaml
from zero2all.recipe.named_plugins import plugin_versions
from zero2all.recipe.parallel import parallel_mistakes
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.hf_directory import TOKENIZER_FILES
from zero2all.tokens import TokenStore
from zero2all.train.plan import Plan

ENVIRONMENT_FILE = "environment.json"
INIT_FILE = "init.json"
TEST_SETS = "test_sets"  # directory of tokenized test sets
RENAME = "choose another name (--name, or run in the recipe)"


class Run:
    """The directory of a run: its recipe, tokenizer, record and checkpoints.

    >>> run = Run.open("runs/quickstart")
    >>> model, tokenizer = run.load_model(), run.tokenizer()
    """

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.recipe, self.directory = recipe, directory
        options = recipe.checkpoint
        self.checkpoints = CheckpointStore(
            recipe.checkpoint_dir or directory / "checkpoints", options.keep_latest, options.keep_best
        )
        self.record_path = directory / "record.jsonl"

    @classmethod
    def open(cls, directory: str | Path) -> Run:
        """An existing run; ``directory`` may also be the workspace (``out``) of the run ``run``."""
        for candidate in (Path(directory), Path(directory) / DEFAULT_RUN):
            if (candidate / IDENTITY_FILE).exists():
                recipe = _load_saved_recipe(candidate / "recipe.yaml")
                return cls(recipe.model_copy(update={"out": workspace_of(candidate, recipe.run)}), candidate)
        if below := find_runs_below(Path(directory)):
            raise UsageError(f"no run in {directory} itself; give one of those below: {', '.join(map(str, below))}")
        hint = did_you_mean(Path(directory)) or ": 'z2a train' writes one"
        raise UsageError(f"no run in {directory}{hint}")

    def with_recipe(self, recipe: Recipe) -> Run:
        """The same run with values that the recipe left open."""
        copied = copy(self)
        copied.recipe = recipe
        return copied

    def check_directory(self) -> None:
        """Raise if the directory holds something else, or if one of two runs would be inside the other."""
        above = [parent for parent in self.directory.parents if parent.is_relative_to(self.recipe.out)]
        for other in (*above, *find_runs_below(self.directory)):
            if other != self.directory and (other / IDENTITY_FILE).exists():
                raise UsageError(f"{self.directory} and the run in {other} would be one inside the other: {RENAME}")
        if (self.directory / MANIFEST).exists():
            raise UsageError(f"{self.directory} holds the output of another command: {RENAME}")

    def save_metadata(
        self, identity: RunIdentity, tokenizer: Tokenizer, device: torch.device, init: InitialWeights | None = None
    ) -> None:
        """Write all that is needed to rebuild the run, and a copy of its tokenizer, which may be trained again.

        Called at every start by the process that holds the run lock; it also removes what killed processes left.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(self.directory / "recipe.yaml", recipe_yaml(_with_absolute_paths(self.recipe)))
        plugins = plugin_versions(self.recipe)
        self._warn_of_versions(plugins)
        environment = {**collect_environment(device), **({"plugins": plugins} if plugins else {})}
        write_json(self.directory / ENVIRONMENT_FILE, environment)
        (self.directory / "tokenizer").mkdir(exist_ok=True)
        for path in tokenizer_files(tokenizer):
            write_text(self.directory / "tokenizer" / path.name, path.read_text(encoding="utf-8"))
        if init is not None:
            write_record(self.directory / INIT_FILE, init)
        write_json(self.directory / IDENTITY_FILE, asdict(identity))
        self.checkpoints.remove_leftovers()

    def _warn_of_versions(self, plugins: dict[str, str]) -> None:
        """Say which plugins are not the ones that the run was last trained with."""
        path = self.directory / ENVIRONMENT_FILE
        try:
            before = json.loads(path.read_text(encoding="utf-8"))["plugins"] if path.exists() else {}
        except (OSError, ValueError, LookupError, TypeError):  # it had none
            return
        for name, version in plugins.items():
            if (was := before.get(name, version)) != version:
                warn(f"the {name} is of {version}, and the run was trained with {was}: its steps may differ")

    def create_flash_dir(self) -> Path | None:
        """The directory of in-memory checkpoints. Its name is unique, also after a run at the same path was removed.

        None on a system without the default place for it, such as macOS.
        """
        place, path = self.recipe.checkpoint.flash_dir, self.directory / KEY_FILE
        if place == SHM_DIRECTORY and not place.is_dir():
            say(
                f"no in-memory checkpoints: this system has no {place}, so a run that is killed resumes from the last "
                "durable checkpoint (checkpoint.every)"
            )
            return None
        if self.flash_dir is None:
            with atomic_path(path) as partial:
                partial.touch(mode=0o600)  # whoever knows the name could create that directory first
                partial.write_text(f"{secrets.token_hex(8)}\n", encoding="utf-8")
        return self.flash_dir

    @property
    def flash_dir(self) -> Path | None:
        key = read_key(self.directory)
        return None if key is None else flash_directory(self.recipe.checkpoint.flash_dir, key)

    @property
    def exists(self) -> bool:
        """Whether it was ever started."""
        return (self.directory / IDENTITY_FILE).exists()

    def stored_recipe(self) -> Recipe | None:
        """The recipe with which the run was last started, or None if it never was."""
        return _load_saved_recipe(self.directory / "recipe.yaml") if self.exists else None

    def identity(self) -> RunIdentity:
        return read_record(RunIdentity, self.directory / IDENTITY_FILE)

    def initial_weights(self) -> InitialWeights | None:
        """The weights that the run began with; None if they were random."""
        path = self.directory / INIT_FILE
        return read_record(InitialWeights, path) if path.exists() else None

    def tokenizer(self) -> Tokenizer:
        """The run's own copy."""
        return Tokenizer(self.directory / "tokenizer")

    def plan(self) -> Plan:
        """The plan of the run, if the token store is still the one it was trained on."""
        plan = Plan(self.recipe, TokenStore(self.recipe.tokens_dir, "train"))
        if plan.identity() != self.identity().stages:
            raise Z2aError(
                f"{self.recipe.tokens_dir} has changed since this run: its batches cannot be rebuilt from it"
            )
        return plan

    def load_model(self, step: int | None = None) -> Z2all:
        """The weights of a checkpoint, by default the newest."""
        step = self.valid_step(step)
        config = self._checkpoint_config(step)
        with torch.device("meta"):
            model = Z2all(config)
        model = model.to_empty(device="cpu").init_buffers()
        self.checkpoints.load_model(step, model)
        return model.eval()

    def load_parallel_model(self, parallel: ParallelRecipe, step: int | None = None) -> ParallelModel:
        """The same over ranks that ``z2a launch`` has started; the layout may differ from the trained one.

        >>> model = run.load_parallel_model(ParallelRecipe(tp=2, dp_shard=1, sp=False))  # on each of two ranks
        """
        step = self.valid_step(step)
        config = self._checkpoint_config(step)
        for mistake in parallel_mistakes(config, self.recipe.train, parallel):
            raise UsageError(mistake.message)
        mesh = ParallelMesh.init_distributed(parallel, pick_device(self.recipe.train.device))
        model = ParallelModel(config, parallel, mesh, seed=self.recipe.seed)
        self.checkpoints.load_model(step, model.model)
        return model

    def valid_step(self, step: int | None = None) -> int:
        """The step of a checkpoint that is complete: the given one, or the newest."""
        step = self.checkpoints.newest_valid(read_lineage(self.directory)) if step is None else step
        if step is None or not self.checkpoints.is_valid(step):
            available = ", ".join(map(str, self.checkpoints.steps())) or "none"
            of_step = "" if step is None else f" of step {step}"
            raise Z2aError(f"no valid checkpoint{of_step} in {self.directory}; steps there: {available}")
        return step

    def _checkpoint_config(self, step: int) -> ModelConfig:
        path = self.directory / IDENTITY_FILE
        try:
            config = ModelConfig.model_validate(self.identity().model)
            # A stage may have changed RoPE since the run began.
            path = self.checkpoints.path(step) / STATE_FILE
            rope = self.checkpoints.read_state(step).rope
            return ModelConfig.model_validate({**config.model_dump(mode="json"), **asdict(rope)})
        except ValidationError as error:
            raise _damaged_error(path, first_problem(error)) from error


def _load_saved_recipe(path: Path) -> Recipe:
    """The recipe saved in a run directory."""
    try:
        recipe = load_recipe(path)
    except RecipeError as error:
        raise _damaged_error(path, str(error.problems[0])) from error
    except UsageError as error:
        raise _damaged_error(path, str(error).removeprefix(f"{path} ")) from error
    if not path.read_text(encoding="utf-8").strip():
        raise _damaged_error(path, "it is empty")
    return recipe


def _damaged_error(path: Path, reason: str) -> Z2aError:
    return Z2aError(
        f"{path} is damaged ({reason}): restore it from a copy of the run, or train another run on the same tokens "
        f"({NEW_RUN_COMMAND})"
    )


def require_data(recipe: Recipe) -> None:
    """Raise one error for all stages whose output is missing. If only one is, the error comes from reading it."""
    missing = []
    if not (recipe.tokenizer_dir / TOKENIZER_FILES[0]).exists():
        missing.append((f"no tokenizer in {recipe.tokenizer_dir}", "'z2a tokenizer train RECIPE'"))
    if not (recipe.tokens_dir / MANIFEST).exists():
        missing.append((f"no tokens in {recipe.tokens_dir}", "'z2a tokens build RECIPE'"))
    if missing and not (recipe.documents_dir / MANIFEST).exists():
        missing.insert(0, (f"no documents in {recipe.documents_dir}", "'z2a corpus build RECIPE'"))
    if len(missing) > 1:
        whats, commands = zip(*missing, strict=True)
        raise Z2aError(
            f"{', '.join(whats)}: make them with {', then '.join(commands)}; to use those in another directory, "
            "set tokenizer.dir and tokens.dir"
        )


def tokenizer_files(tokenizer: Tokenizer) -> list[Path]:
    """The Hugging Face files of a tokenizer directory; a chat template is optional."""
    return [path for name in TOKENIZER_FILES if (path := tokenizer.directory / name).exists()]


def resolve_model_config(recipe: Recipe, tokenizer: Tokenizer) -> ModelConfig:
    """The recipe's model config with the vocabulary size of the tokenizer."""
    config = recipe.model
    if config.vocab_size is None:
        return config.model_copy(update={"vocab_size": tokenizer.vocab_size})
    if config.vocab_size < tokenizer.vocab_size:
        raise UsageError(
            f"model.vocab_size is {config.vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens"
        )
    return config


def model_identity(config: ModelConfig) -> dict[str, Any]:
    """What a checkpoint of the model depends on. Keys that came later are left out where they change nothing."""
    later = {key for key in ("lora", "attention_dropout", "residual_dropout") if not getattr(config, key)}
    values: dict[str, Any] = config.model_dump(mode="json", exclude={"preset", "ops", *later})
    return values


def init_path(recipe: Recipe) -> str | None:
    """``train.init`` as an absolute path."""
    return None if recipe.train.init is None else str(recipe.train.init.absolute())


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Every section's directory as an absolute path, so that the recipe means the same from any working directory."""
    values = recipe.model_dump(mode="json")
    values["out"] = str(recipe.out.absolute())
    for section in ("corpus", "tokenizer", "tokens", "checkpoint"):
        if values[section]["dir"] is not None:
            values[section]["dir"] = str(to_path(values[section]["dir"]).absolute())
    values["train"]["init"] = init_path(recipe)
    if (teacher := recipe.train.objective.distill.teacher) is not None:
        values["train"]["objective"]["distill"]["teacher"] = str(teacher.absolute())
    for name, path in values["evals"]["test_sets"].items():
        if not is_url(path):
            values["evals"]["test_sets"][name] = str(Path(path).expanduser().absolute())
    return Recipe.model_validate(values)


def collect_environment(device: torch.device) -> dict[str, Any]:
    """What one needs to know to judge or reproduce a metric."""
    return {
        "zero2all": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_binding": asdict(rank_binding()),
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed_files": len(git("status", "--porcelain").splitlines())}
    except (OSError, subprocess.SubprocessError):
        return None
