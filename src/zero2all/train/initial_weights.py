"""``train.init``: pretrained weights that a run begins with.

>>> weights = open_weights(find_weights(Path("Qwen3-0.6B")))  # or the directory of a run or of a checkpoint
>>> teacher = load_model(weights)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from zero2all.base.console import say, warn
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import fingerprint
from zero2all.base.paths import RemotePath
from zero2all.base.workspace import find_runs_below
from zero2all.checkpoint import CheckpointWeights, InitialWeights, RankGroup
from zero2all.checkpoint.checkpoint_directory import checkpoint_step
from zero2all.checkpoint.training_state import read_lineage
from zero2all.model import HFWeights, StoredWeights
from zero2all.model.hf_weights import CONFIG
from zero2all.model.weights import GrownVocabulary, WeightReader, unstored_weights
from zero2all.parallel import ParallelModel
from zero2all.recipe import Mistake, ModelConfig, Recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.hf_directory import TOKENIZER_FILES
from zero2all.train.resume import model_changes
from zero2all.train.run import Run

# What does not change the logits of a model, so that it may differ from the model whose weights these are.
FREE_KEYS = {
    "preset", "ops", "vocab_size", "max_position_embeddings", "residual_fp32", "initializer_range", "z_loss",
    "mtp_weight", "mup_base", "lora", "attention_dropout", "residual_dropout",
}  # fmt: skip
FREE_MOE_KEYS = {"load_balancing", "router_aux_loss_coef", "bias_update_rate"}


@dataclass(frozen=True)
class WeightsLocation:
    """Where weights are, and the tokenizer that they were trained with."""

    path: Path
    """A checkpoint or a Hugging Face directory."""
    tokenizer: Path | None
    """The directory of the tokenizer; None if it is not there."""


def find_weights(path: Path) -> WeightsLocation:
    """The newest checkpoint of a run, a checkpoint, or a Hugging Face directory."""
    path = path.absolute()
    if checkpoint_step(path.name) is not None:
        return WeightsLocation(path, _tokenizer_in(path.parent.parent / "tokenizer"))  # of the run, if it is there
    if isinstance(path, RemotePath):
        raise UsageError(
            f"{path} is not a checkpoint, such as {path}/step-00000400; weights of another kind must be on a local "
            "disk ('z2a corpus fetch' downloads them)"
        )
    if not path.is_dir():
        reason = "is a file: give its directory" if path.exists() else "does not exist"
        raise UsageError(f"{path} {reason}")
    if (path / CONFIG).exists():
        return WeightsLocation(path, _tokenizer_in(path))
    if not find_runs_below(path):
        raise UsageError(
            f"{path} is not the directory of a run, of a checkpoint (such as step-00000400) or of a Hugging Face model "
            f"({CONFIG} and *.safetensors)"
        )
    run = Run.open(path)
    step = run.checkpoints.newest(read_lineage(run.directory))
    if step is None:
        raise UsageError(f"the run in {run.directory} has no checkpoint yet")
    return WeightsLocation(run.checkpoints.path(step).absolute(), _tokenizer_in(run.directory / "tokenizer"))


def _tokenizer_in(directory: Path) -> Path | None:
    is_there = not isinstance(directory, RemotePath) and (directory / TOKENIZER_FILES[0]).exists()
    return directory if is_there else None


def open_weights(location: WeightsLocation) -> StoredWeights:
    """The weights at a location. What can be checked without reading them is checked here."""
    is_checkpoint = checkpoint_step(location.path.name) is not None
    return CheckpointWeights(location.path) if is_checkpoint else HFWeights(location.path)


@dataclass(frozen=True)
class InitialWeightsPlan:
    """Weights that a model can begin with."""

    weights: StoredWeights
    reader: WeightReader
    """The same with the vocabulary of the model."""
    record: InitialWeights


def plan_initial_weights(
    location: WeightsLocation, config: ModelConfig, tokenizer: Tokenizer | None
) -> InitialWeightsPlan:
    """Refuse weights of another model or vocabulary. Without a tokenizer, only the model is compared."""
    weights = open_weights(location)
    if changes := config_changes(weights.config, config):
        raise UsageError(f"train.init: {_differences(location.path, changes)}")
    new_tokens = {} if tokenizer is None else _new_tokens(location, weights, config, tokenizer)
    with _naming(location.path):
        reader = GrownVocabulary(weights, config, new_tokens)
        seeded = unstored_weights(reader)
    step = weights.step if isinstance(weights, CheckpointWeights) else None
    record = InitialWeights(str(location.path), step, weights.dtype, len(new_tokens), seeded, None)
    return InitialWeightsPlan(weights, reader, record)


def load_initial_weights(path: Path, model: ParallelModel, tokenizer: Tokenizer, ranks: RankGroup) -> InitialWeights:
    """Load the weights of ``train.init`` on all ranks, each its own shards, after their checksums were computed.

    Rank 0 chooses the checkpoint of a run: one that is still being trained may write another meanwhile.
    """
    location = ranks.on_rank0(lambda: find_weights(path))
    plans: list[InitialWeightsPlan] = []  # not returned: files that are open cannot be sent to other ranks

    def verify() -> dict[str, str]:
        plans.append(plan_initial_weights(location, model.config, tokenizer))
        return plans[0].weights.checksums(ranks.rank, ranks.world_size)

    digest = ranks.gather(verify, lambda parts: fingerprint(functools.reduce(operator.or_, parts)))
    [plan] = plans

    def load() -> None:
        with _naming(location.path):
            model.load_weights(plan.reader)

    ranks.on_all_ranks(load)
    loaded = replace(plan.record, fingerprint=digest)
    say(initial_weights_line(loaded))
    return loaded


def initial_weights_line(weights: InitialWeights) -> str:
    parts = [f"initial weights: {weights.path}, stored in {weights.dtype}"]
    if weights.fingerprint is not None:
        parts.append(f"fingerprint {weights.fingerprint}")
    if weights.new_tokens:
        parts.append(f"{weights.new_tokens:,} rows added to the vocabulary")
    if weights.seeded:
        parts.append(f"{len(weights.seeded)} weights drawn from the seed, such as {weights.seeded[0]}")
    return ", ".join(parts)


def initial_weights_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Why the weights of ``train.init``, if it is set, do not fit the recipe's model."""
    if recipe.train.init is None:
        return
    try:
        location = find_weights(recipe.train.init)
        changes = config_changes(open_weights(location).config, recipe.model)
    except (Z2aError, OSError) as error:
        yield Mistake(str(error), ("train.init",))
        return
    if changes:
        yield Mistake(_differences(location.path, changes), ("train.init", "model"))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except Z2aError as error:
        raise Z2aError(f"train.init: {path} cannot be used: {error}") from error


def _differences(path: Path, changes: list[str]) -> str:
    return f"{path} has {'; '.join(changes)}: set model as there ('z2a plan {path}' prints it)"


def config_changes(stored: ModelConfig, config: ModelConfig) -> list[str]:
    """Every difference between the model of the weights and the recipe's that changes what is computed."""

    def computed(model: ModelConfig) -> dict[str, object]:
        values = model.model_dump(mode="json", exclude=FREE_KEYS)
        values["head_dim"] = model.head_size
        if model.moe is not None:
            values["moe"] = model.moe.model_dump(mode="json", exclude=FREE_MOE_KEYS)
        return values

    changes = list(map(str, model_changes(computed(stored), computed(config))))
    if stored.lora is not None and stored.lora != config.lora:
        changes.append("adapters (model.lora) that are not merged: 'z2a export' merges them, or keep model.lora")
    if stored.moe is not None and config.moe is not None:
        before, now = stored.moe.load_balancing, config.moe.load_balancing
        if before == "bias" and now != before:  # the other way round, the bias starts at zero
            changes.append(f"model.moe.load_balancing={before}, not {now}")
    return changes


def _new_tokens(
    location: WeightsLocation, weights: StoredWeights, config: ModelConfig, tokenizer: Tokenizer
) -> dict[int, list[int]]:
    """The tokens that the weights have no rows of, each with the old tokens that it is made of."""
    stored_size, size = weights.config.vocab_size or 0, config.vocab_size or 0
    if size < stored_size:
        raise UsageError(
            f"train.init: {location.path} has {stored_size} rows of the vocabulary, and the model {size}: set "
            f"model.vocab_size={stored_size} (rows without a token are never predicted)"
        )
    old = _old_tokenizer(location, weights, tokenizer)
    if old is None:
        return {token: [] for token in range(stored_size, size)}
    for token, (before, now) in enumerate(zip(_meanings(old), _meanings(tokenizer), strict=False)):
        if before != now:
            raise UsageError(
                f"train.init: token {token} is {_show(before)} in {location.tokenizer}, but {_show(now)} in "
                f"{tokenizer.directory}: train with the tokenizer of the weights (tokenizer.dir), or extend it "
                "('z2a tokenizer extend')"
            )
    known = max(stored_size, tokenizer.vocab_size)
    from zero2all.tokenizer.extend import decompose_new_tokens  # imports numba, which no other training needs

    subtokens = decompose_new_tokens(old, tokenizer)
    return dict(enumerate(subtokens, old.vocab_size)) | {token: [] for token in range(known, size)}


def _old_tokenizer(location: WeightsLocation, weights: StoredWeights, tokenizer: Tokenizer) -> Tokenizer | None:
    """The tokenizer of the weights; None if it is not known, and the new one has no more tokens than the weights."""
    if isinstance(weights, CheckpointWeights) and weights.tokenizer_fingerprint == tokenizer.fingerprint:
        return tokenizer
    if location.tokenizer is not None:
        return Tokenizer(location.tokenizer)
    where = f"the tokenizer of {location.path} is not there"
    if isinstance(weights, CheckpointWeights):
        raise UsageError(
            f"train.init: {where}, and the recipe has another one: give the directory of the run, or train with its "
            "tokenizer (tokenizer.dir)"
        )
    if tokenizer.vocab_size > (weights.config.vocab_size or 0):
        raise UsageError(
            f"train.init: {where}, so the {tokenizer.vocab_size} tokens of {tokenizer.directory} cannot be matched to "
            f"its {weights.config.vocab_size} rows: copy its {TOKENIZER_FILES[0]} there ('z2a tokenizer import' makes "
            "one of a tokenizer.model)"
        )
    warn(f"{where}: make sure that {tokenizer.directory} is the one with which the weights were trained")
    return None


def _meanings(tokenizer: Tokenizer) -> Iterator[tuple[bytes, bool]]:
    """What each token stands for, and whether it is special."""
    special = set(tokenizer.special_ids.values())
    for token, text in enumerate(tokenizer.token_bytes):
        yield text, token in special


def _show(meaning: tuple[bytes, bool]) -> str:
    text, is_special = meaning
    return f"{'the special token ' if is_special else ''}{text.decode('utf-8', 'backslashreplace')!r}"
