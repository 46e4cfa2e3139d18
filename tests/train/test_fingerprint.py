"""The fingerprint of a run: every key of the recipe is in it or on the list of exceptions, and a change is reported."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError
from zero2all.base.units import Duration
from zero2all.checkpoint import RunIdentity
from zero2all.checkpoint.training_state import StageIdentity
from zero2all.recipe import Recipe, StageRecipe, parse_recipe
from zero2all.recipe.run_settings import EXCEPTIONS, run_settings, stage_settings
from zero2all.train import train
from zero2all.train.resume import SettingChange, identity_changes, model_changes, setting_changes, stage_setting_changes
from zero2all.train.run import model_identity

MAX_EXCEPTIONS = 60
# Sections that are excepted as a whole. Text is compared by the fingerprint of what is built of it, schedules by their
# learning rates. The keys of the others are listed, so that nobody adds one that changes what is computed.
COMPARED_OTHERWISE = {"corpus", "tokenizer", "tokens", "train.schedule", "train.stages.schedule", "train.extensions"}
EXCEPTED_KEYS = {
    "checkpoint": "dir every flash_dir flash_every keep_best keep_every keep_latest replica_rate replicas",
    "track": "layer_norms_every log_every sinks",
    "evals": "benchmarks every prompts stories test_sets tokens",
    "model.ops": "attention cross_entropy experts norm rope swiglu",
}


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key, also inside lists and optional sections, and every section."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_in(field.annotation):
            yield from keys_of(inner, f"{prefix}{name}.")


ALL_KEYS = sorted(set(keys_of(Recipe)))
KEYS = [key for key in ALL_KEYS if not any(other.startswith(f"{key}.") for other in ALL_KEYS)]
COMPARED = [key for key in KEYS if not any(f"{key}.".startswith(f"{section}.") for section in EXCEPTIONS)]

BASE = """
model: {hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 8192,
  lora: {target_modules: [q_proj]},
  rope_scaling: {rope_type: yarn, factor: 2, original_max_position_embeddings: 64},
  moe: {num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32}}
train: {steps: 10, seq_len: 64, batch_tokens: 256, batch_ramp: {start: 64, over: 2 steps}, optimizer: {lr: 1e-3},
  init: /weights}
"""


def with_value(section: BaseModel, path: list[str], value: Any) -> Any:
    """A copy in which one key has another value, whether or not the rules of the recipe allow it."""
    name, *rest = path
    return section.model_copy(update={name: with_value(getattr(section, name), rest, value) if rest else value})


def other_value(recipe: Recipe, path: list[str]) -> Any:
    value: Any = recipe
    for name in path:
        value = getattr(value, name)
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case dict():
            return {"en": 2.0}
        case list() | tuple():
            return [*value, 1]
        case Duration():
            return Duration(7, "steps")
        case _:
            return Path("/different") if isinstance(value, Path) or path[-1] == "teacher" else "different"


def changes_between(before: Recipe, now: Recipe) -> list[SettingChange]:
    """What a resume reports, for the parts of the identity that are computed from the recipe alone."""
    stages = zip(before.train.resolved_stages(), now.train.resolved_stages(), strict=True)
    return [
        *setting_changes(run_settings(before), run_settings(now)),
        *(change for pair in stages for change in stage_setting_changes(*map(stage_settings, pair), "main")),
        *model_changes(model_identity(before.model), model_identity(now.model)),
        *(
            [SettingChange("train.init", before.train.init, now.train.init)]
            if before.train.init != now.train.init
            else []
        ),
    ]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("key", [key for key in COMPARED if not key.startswith("train.stages.")])
def test_a_change_of_any_key_but_an_exception_is_reported_with_the_key(key: str) -> None:
    path = key.split(".")
    before = parse_recipe(BASE, [])
    if key.startswith("train.objective.") and len(path) == 4:  # options of an objective count while it is trained
        before = with_value(before, ["train", "objective", "name"], path[2])
    now = with_value(before, path, other_value(before, path))
    assert key in [change.key for change in changes_between(before, now)]


def test_a_stage_of_its_own_reports_the_same_keys() -> None:
    before, now = (
        parse_recipe(
            BASE, ["train.steps=null", "train.batch_ramp=null", f"train.stages=[{{name: s, steps: 4, {own}}}]"]
        )
        for own in ("seq_len: 64", "seq_len: 128, mixture: {zh: 1}, rope_theta: 5e5, max_epochs: 2")
    )
    one, other = (stage_settings(recipe.train.resolved_stages()[0]) for recipe in (before, now))
    found = {change.key for change in stage_setting_changes(one, other, "s")}
    assert found == {f"train.stages.s.{key}" for key in ("seq_len", "mixture", "rope_theta", "max_epochs")}


def test_the_exceptions_exist_are_few_and_have_reasons() -> None:
    assert len(EXCEPTIONS) <= MAX_EXCEPTIONS
    assert set(EXCEPTIONS) <= set(ALL_KEYS)
    for key, reason in EXCEPTIONS.items():
        assert len(reason.split()) >= 3, key


def test_a_new_key_of_an_excepted_section_needs_a_decision() -> None:
    found = {section: set[str]() for section in EXCEPTIONS if any(key.startswith(f"{section}.") for key in ALL_KEYS)}
    for key in KEYS:
        for section in found:
            if key.startswith(f"{section}."):
                found[section].add(key.removeprefix(f"{section}."))
    assert set(found) == COMPARED_OTHERWISE | set(EXCEPTED_KEYS)
    assert {section: " ".join(sorted(found[section])) for section in EXCEPTED_KEYS} == EXCEPTED_KEYS


def test_every_key_of_a_stage_is_in_its_settings_or_excepted() -> None:
    stage = parse_recipe(BASE, []).train.resolved_stages()[0]
    excepted = {key.rpartition(".")[2] for key in EXCEPTIONS if key.startswith("train.stages.")}
    assert set(stage_settings(stage)) == set(StageRecipe.model_fields) - excepted - {"name"}  # StageIdentity.name


@pytest.fixture(scope="module")
def trained(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    train(tiny_recipe(workspace, f"out={out}", "train.steps=2", "train.schedule.shape=constant"))
    return out


def resume(workspace: Path, out: Path, *overrides: str, extend: Any = None) -> Any:
    recipe = tiny_recipe(workspace, f"out={out}", "train.steps=3", "train.schedule.shape=constant", *overrides)
    return train(recipe, extend=extend)


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def test_a_different_objective_mask_or_seed_fails_with_key_and_both_values(trained: Path, workspace: Path) -> None:
    changed = ["train.document_mask=true", "seed=12", "train.seq_len=64", "model.z_loss=0.1"]
    with pytest.raises(UsageError) as failed:
        resume(workspace, trained, *changed, "train.optimizer.name=lion", extend="as-planned")
    assert (
        "was trained with seed=11, not 12; train.document_mask=False, not True; train.optimizer.name=adamw, not lion; "
        "train.seq_len=32, not 64; model.z_loss=0.0, not 0.1. Set the recipe as it was" in str(failed.value)
    )
    assert "z2a train RECIPE --name NAME" in str(failed.value)
    assert f"train.init={trained / 'run'} starts it with these weights" in str(failed.value)


def test_distillation_does_not_resume_pretraining_and_asks_no_teacher_before(trained: Path, workspace: Path) -> None:
    options = ["train.objective.name=distill", "train.objective.distill.teacher=/no/such/teacher"]
    with pytest.raises(UsageError, match=r"train\.objective\.name=pretrain, not distill"):
        resume(workspace, trained, *options)


def test_adjustable_keys_need_extend(
    trained: Path, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copied(trained, tmp_path / "out")
    changed = ["train.optimizer.lr=1e-3", "train.optimizer.max_grad_norm=0.5", "train.guard.policy=skip"]
    with pytest.raises(UsageError) as failed:
        resume(workspace, out, *changed)
    assert (
        "train.optimizer.lr=0.005, not 0.001; train.optimizer.max_grad_norm=1.0, not 0.5; train.guard.policy=warn, not "
        "skip. To continue it with the new values, add --extend as-planned" in str(failed.value)
    )
    assert resume(workspace, out, *changed, extend="as-planned").resumed_at == 2
    said = capsys.readouterr().err
    assert "train.optimizer.lr is 0.001, before 0.005: " in said
    assert "train.guard.policy is skip, before warn" in said
    assert resume(workspace, out, *changed).resumed_at == 3, "the new values are now those of the run"


def test_what_does_not_change_the_objective_needs_nothing(trained: Path, workspace: Path, tmp_path: Path) -> None:
    changed = [
        "train.micro_batch_tokens=64",
        "checkpoint.every=1 steps",
        "track.log_every=1",
        "evals.tokens=1024",
        "model.ops.norm=reference",
        "parallel.activation_checkpointing=full",
        "train.deterministic=true",
        "train.objective.dpo.beta=0.3",  # of an objective that is not trained
    ]
    assert resume(workspace, copied(trained, tmp_path / "out"), *changed).resumed_at == 2


def test_a_key_that_came_later_is_compared_with_its_default() -> None:
    settings = run_settings(parse_recipe(BASE, []))
    older = {key: value for key, value in settings.items() if key != "train.document_mask"}
    assert list(setting_changes(older, settings)) == []
    later = settings | {"train.document_mask": True}
    assert [str(change) for change in setting_changes(older, later)] == ["train.document_mask=False, not True"]


STAGE = StageIdentity("main", 0, "a1", [8, 0, 8, 0], [None, None])
RUN = RunIdentity([STAGE], "t1", {"num_hidden_layers": 2, "qk_norm": False}, "adamw", settings={"seed": 1})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (replace(RUN, tokenizer="t2"), "a different tokenizer"),
        (replace(RUN, settings={"train.optimizer.name": "muon"}), "train.optimizer.name=adamw, not muon"),
        (replace(RUN, model={"num_hidden_layers": 3, "qk_norm": False}), "model.num_hidden_layers=2, not 3"),
        (replace(RUN, model={"num_hidden_layers": 2}), "model.qk_norm=False, not None"),
        (replace(RUN, settings={"train.document_mask": True}), "train.document_mask=False, not True"),
        (replace(RUN, init="/weights"), "train.init=None, not /weights"),
        (replace(RUN, stages=[replace(STAGE, batch=[4, 0, 4, 0])]), "8 samples in a batch of stage main, not 4"),
        (replace(RUN, stages=[replace(STAGE, batch=[8, 0, 2, 5])]), "a different train.batch_ramp in stage main"),
        (replace(RUN, stages=[replace(STAGE, samples="b")]), "different samples in stage main (seed, train.seq_len"),
        (
            replace(RUN, stages=[replace(STAGE, rope=[5e5, None])]),
            "a different rope_theta or rope_scaling of stage main",
        ),
        (replace(RUN, stages=[replace(STAGE, name="x")]), "stage main at step 0, not x at step 0"),
        (replace(RUN, stages=[STAGE, STAGE]), "1 stages begun, not 2"),
    ],
)
def test_each_difference_is_named_with_its_key(changed: RunIdentity, said: str) -> None:
    [found] = identity_changes(RUN, changed)
    assert found.startswith(said)


def test_every_part_of_an_identity_is_compared() -> None:
    assert identity_changes(RUN, RUN) == []
    compared = {"stages", "tokenizer", "model", "optimizer", "init", "settings"}
    assert {field.name for field in fields(RunIdentity)} == compared
    assert {field.name for field in fields(StageIdentity) if field.compare} == {
        "name", "first_step", "samples", "batch", "rope",
    }  # fmt: skip
