"""A tokenizer or token store that runs were trained with is not replaced: they could not be resumed or traced."""

from __future__ import annotations

import shlex
from itertools import count
from pathlib import Path
from typing import Literal

from zero2all.base.console import warn
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import read_record, sha256_file
from zero2all.base.workspace import IDENTITY_FILE, find_runs_below
from zero2all.checkpoint import RunIdentity
from zero2all.recipe import Recipe
from zero2all.tokens import TokenStore
from zero2all.train.plan import Plan
from zero2all.train.run import Run

MAX_LISTED_RUNS = 3


def refuse_tokenizer_change(tokenizer_dir: Path, workspace: Path, remedy: str) -> None:
    """Raise if a run of the workspace, or of the one that the tokenizer is in, has this tokenizer."""
    fingerprint = sha256_file(tokenizer_dir / "tokenizer.json")
    users = [run for run in _runs(workspace, tokenizer_dir.parent) if _tokenizer_fingerprint(run) == fingerprint]
    if users:
        raise UsageError(f"{tokenizer_dir} is the tokenizer of {_listed(users)} and is not replaced{remedy}")


def refuse_store_change(tokens_dir: Path, workspace: Path, remedy: str) -> None:
    """Raise if a run of the workspace, or of the one that the token store is in, was trained on this store."""
    if users := store_users(tokens_dir, workspace):
        raise UsageError(f"{tokens_dir} has the tokens of {_listed(users)} and is not replaced{remedy}")


def warn_about_new_documents(recipe: Recipe) -> None:
    if users := store_users(recipe.tokens_dir, recipe.out):
        warn(
            f"the tokens of {_listed(users)} are of the documents that these replace: they are kept, but cannot be "
            "built from these documents if they are damaged"
        )


def store_users(tokens_dir: Path, workspace: Path) -> list[Path]:
    """The runs that were trained on the store as it is now."""
    try:
        store = TokenStore(tokens_dir, "train")
    except Z2aError:  # not finished, or of another version
        return []
    return [run for run in _runs(workspace, tokens_dir.parent) if _was_trained_on(run, store)]


def commands_beside(stage: Literal["tokenizer", "tokens"], recipe: Recipe, path: Path, overrides: list[str]) -> str:
    """The end of a refusal: the commands that write the stage to a free directory and train a run on it.

    ``recipe`` is the one at ``path`` with the overrides.
    """
    places = {"tokenizer.dir": recipe.tokenizer_dir, "tokens.dir": recipe.tokens_dir}
    commands = [["tokenizer", "train"], ["tokens", "build"], ["train"]]
    if stage == "tokens":
        del places["tokenizer.dir"], commands[0]
    numbered = ({key: f"{place}-{number}" for key, place in places.items()} for number in count(2))
    free = next(found for found in numbered if not any(Path(place).exists() for place in found.values()))
    kept = [override for override in overrides if override.partition("=")[0] not in free]
    words = [str(path), *kept, *(f"{key}={place}" for key, place in free.items())]
    lines = [["z2a", *command, *words, *(["--name", "NAME"] if command == ["train"] else [])] for command in commands]
    return ". To train on another one beside it:\n" + "\n".join(f"  {shlex.join(line)}" for line in lines)


def _runs(*workspaces: Path) -> list[Path]:
    by_place = {run.resolve(): run for workspace in reversed(workspaces) for run in find_runs_below(workspace)}
    return sorted(by_place.values())


def _tokenizer_fingerprint(run: Path) -> str | None:
    try:
        return read_record(RunIdentity, run / IDENTITY_FILE).tokenizer
    except Z2aError:  # damaged
        return None


def _was_trained_on(run: Path, store: TokenStore) -> bool:
    try:
        opened = Run.open(run)
        return Plan(opened.recipe, store).identity() == opened.identity().stages
    except Z2aError:  # damaged, or the store has no such sources
        return False


def _listed(runs: list[Path]) -> str:
    more = len(runs) - MAX_LISTED_RUNS
    return ", ".join(map(str, runs[:MAX_LISTED_RUNS])) + (f" and {more} more" if more > 0 else "")
