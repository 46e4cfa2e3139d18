"""The answers that a run compares: in rows of both splits, and by the reference model."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.checkpoint import InitialWeights, RankGroup
from zero2all.console import say
from zero2all.errors import Z2aError
from zero2all.hardware import dtype_name
from zero2all.parallel import ParallelModel
from zero2all.recipe import ModelConfig, Recipe
from zero2all.recipe.objective import ObjectiveRecipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.tokens.conversation_rows import ConversationRows
from zero2all.tokens.token_store import Split
from zero2all.train.initial_weights import load_initial_weights
from zero2all.train.mismatched import MismatchedAnswers
from zero2all.train.plan import Plan
from zero2all.train.reference import (
    REFERENCE,
    Reference,
    compute_reference,
    read_reference,
    reference_key,
    write_reference,
)
from zero2all.train.run import Run


def objective_config(config: ModelConfig, objective: ObjectiveRecipe) -> ModelConfig:
    """With a loss kernel that can weigh tokens differently: Liger's gradient is that of equal weights."""
    if not objective.weighs_tokens or config.ops.cross_entropy != "auto":
        return config
    return config.model_copy(update={"ops": config.ops.model_copy(update={"cross_entropy": "chunked"})})


class AnswerSources:
    """The rows of both splits of all sources that a run trains on."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.seq_len = max(stage.seq_len for stage in recipe.train.resolved_stages())
        self.fingerprints: list[str] = []
        self.rows: dict[tuple[Split, str], ConversationRows] = {}
        per_example = 2 if recipe.train.conversations == "pairs" else 1
        for split in ("train", "valid"):
            store = TokenStore(recipe.tokens_dir, split)
            self.fingerprints.append(store.fingerprint)
            for name in plan.sources:
                shards = store.sources.get(name, [])
                self.rows[split, name] = ConversationRows(shards, self.seq_len, per_example=per_example)
        self.mismatched: dict[str, MismatchedAnswers] = {}
        if recipe.train.objective.name == "kto":
            self.mismatched = {name: MismatchedAnswers(self.rows["train", name], name) for name in plan.sources}

    @property
    def validation(self) -> dict[str, ConversationRows]:
        return {name: rows for (split, name), rows in self.rows.items() if split == "valid"}


@dataclass(frozen=True)
class OpenedReference:
    reference: Reference
    loaded: InitialWeights | None
    """Set if the model has its initial weights now, because the reference was computed."""


def open_reference(
    run: Run, model: ParallelModel, tokenizer: Tokenizer, answers: AnswerSources, ranks: RankGroup
) -> OpenedReference:
    """The reference of a run: stored, or computed with the initial weights, which must be those that it began with."""
    directory, init = run.directory / REFERENCE, run.recipe.train.init
    assert init is not None
    settings = (answers.fingerprints, answers.seq_len, dtype_name(model.dtype), bool(answers.mismatched))
    recorded = ranks.on_rank0(run.initial_weights)
    if recorded is not None:
        key = reference_key(recorded.fingerprint, *settings)
        stored = ranks.on_rank0(lambda: read_reference(directory, key))
        if stored is not None:
            return OpenedReference(stored, None)
    loaded = load_initial_weights(init, model, tokenizer, ranks)
    if recorded is not None and recorded.fingerprint != loaded.fingerprint:
        raise Z2aError(
            f"{loaded.path} is not what {run.directory} began with, and the log-probabilities by it are not in "
            f"{directory}: restore it, or train another run (--name)"
        )
    reference = compute_reference(model, answers.rows, answers.mismatched)
    key = reference_key(loaded.fingerprint, *settings)
    ranks.on_rank0(lambda: write_reference(directory, key, reference))
    say(f"reference log-probabilities of {sum(map(len, reference.logps.values())):,} answers are in {directory}")
    return OpenedReference(reference, loaded)
