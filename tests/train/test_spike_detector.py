"""The spike guard: silent on clean runs, fires within three steps of bad data, rolls back exactly, reads little."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint.helpers import crashed, losses
from tests.conftest import tiny_recipe
from tests.train.poison import poison
from tests.train.runs import events, trained
from zero2all.base.errors import Z2aError
from zero2all.base.records import parse_record
from zero2all.bench.rank_harness import run_ranks
from zero2all.checkpoint.training_state import GuardState
from zero2all.parallel import ParallelModel
from zero2all.recipe import GuardRecipe, Recipe
from zero2all.tokens import DocumentSpan
from zero2all.train import Run, TrainerHooks, train
from zero2all.train.job import Progress
from zero2all.train.spike_detector import DETECTION_DELAY, MAX_SAMPLES_READ, SpikeDetector
from zero2all.train.spike_policy import SpikePolicy

LONG = [
    "train.steps=90", "train.batch_tokens=128", "train.micro_batch_tokens=null", "checkpoint.every=30 steps",
    "checkpoint.flash_every=5 steps", "train.guard.window=32",
]  # fmt: skip
GARBAGE, NEWLINES = range(50, 53), range(70, 73)


def fired(losses: list[float], norms: list[float], stages: list[int] | None = None, **options: Any) -> list[int]:
    guard = SpikeDetector(GuardRecipe(**options))
    metrics = zip(losses, norms, stages or [0] * len(losses), strict=True)
    return [step for step, (loss, norm, stage) in enumerate(metrics) if guard.check(step, stage, loss, norm)]


def loss_curve(seed: int, steps: int = 400, noise: float = 0.03) -> tuple[list[float], list[float]]:
    """A loss that falls fast, then slowly, with heavy-tailed noise; a gradient norm that falls and fluctuates."""
    rng = random.Random(seed)
    loss = [
        2.5 + 4 * math.exp(-step / 60) + noise * (rng.gauss(0, 1) + rng.gauss(0, 1) ** 3 / 12) for step in range(steps)
    ]
    norm = [(0.4 + 3 * math.exp(-step / 25)) * math.exp(0.25 * rng.gauss(0, 1)) for step in range(steps)]
    return loss, norm


@pytest.mark.parametrize("seed", range(20))
def test_clean_runs_never_trigger_it(seed: int) -> None:
    assert fired(*loss_curve(seed)) == []


def test_a_new_stage_starts_a_new_baseline() -> None:
    (before, norms), (after, more) = loss_curve(1), loss_curve(2)
    loss, norm = before + [value * 0.4 for value in after[200:]], norms + more[200:]  # other text, other loss
    assert fired(loss, norm, [0] * 400 + [400] * 200) == []
    assert fired(loss, norm)[0] == 400  # without a change of stage it is an outlier


@pytest.mark.parametrize(
    ("change", "what"),
    [((1.4, 1.0), "a higher loss"), ((0.6, 1.0), "a lower loss"), ((1.0, 20.0), "a larger gradient"),
     ((1.0, 1 / 20), "a smaller gradient"), ((math.nan, 1.0), "not a number"), ((1.0, math.inf), "no finite gradient")],
)  # fmt: skip
def test_each_kind_of_outlier_is_detected_at_once(change: tuple[float, float], what: str) -> None:
    loss, norm = loss_curve(3)
    loss[200], norm[200] = loss[200] * change[0], norm[200] * change[1]
    assert fired(loss, norm) == [200]


@pytest.mark.parametrize(("small", "large"), [((1.08, 1.0), (1.15, 1.0)), ((1.0, 4.0), (1.0, 7.0))])
def test_small_changes_are_no_outliers_however_steady_the_metric_is(
    small: tuple[float, float], large: tuple[float, float]
) -> None:
    for change, expected in ((small, []), (large, [200])):
        loss, norm = [3.0] * 300, [1.0] * 300
        loss[200], norm[200] = loss[200] * change[0], norm[200] * change[1]
        assert fired(loss, norm) == expected


def test_its_state_is_restored() -> None:
    loss, norm = loss_curve(4)
    loss[300] *= 1.5
    one, other = SpikeDetector(GuardRecipe()), SpikeDetector(GuardRecipe())
    for step in range(250):
        one.check(step, 0, loss[step], norm[step])
    other.load_state(parse_record(GuardState, json.loads(json.dumps(asdict(one.state()))), "state.json"))
    assert [other.check(step, 0, loss[step], norm[step]) is not None for step in range(250, 400)] == [
        step == 300 for step in range(250, 400)
    ]


@pytest.fixture(scope="module")
def poisoned(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token store with garbage where some steps read, and nothing but newlines where others do."""
    tokens = tmp_path_factory.mktemp("poisoned") / "tokens"
    shutil.copytree(workspace / "tokens", tokens)
    poison(tiny_recipe(workspace, f"tokens.dir={tokens}", *LONG), GARBAGE, NEWLINES)
    return tokens


def guard_recipe(workspace: Path, tmp_path: Path, tokens: Path, *overrides: str) -> Recipe:
    places = [f"out={tmp_path}/out", f"tokens.dir={tokens}", f"checkpoint.flash_dir={tmp_path}/memory"]
    return tiny_recipe(workspace, *places, *LONG, *overrides)


@pytest.fixture(scope="module")
def rolled_back(workspace: Path, poisoned: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(guard_recipe(workspace, tmp_path_factory.mktemp("back"), poisoned, "train.guard.policy=rollback"))


def test_bad_data_is_found_named_and_skipped(workspace: Path, tmp_path: Path, rolled_back: Run) -> None:
    run = rolled_back
    spikes = [event["step"] for event in events(run, "spike")]
    assert len(spikes) == 2
    assert spikes[0] in GARBAGE
    assert spikes[1] in NEWLINES
    plan = run.plan()
    for event in events(run, "spike"):
        stage = plan.stage_of(event["step"])
        in_batch = {span.gid for span in stage.dataset.documents(*stage.sample_range(event["step"]))}
        assert {document["gid"] for document in event["documents"]} <= in_batch
        assert event["documents"][0]["title"]

    skipped = {step for first in spikes for step in range(first - DETECTION_DELAY, first - DETECTION_DELAY + 8)}
    assert set(GARBAGE) | set(NEWLINES) <= skipped
    assert run.checkpoints.read_state(90).skipped == sorted(skipped)
    # Every step is in the surviving history once, or was skipped.
    assert set(losses(run)) == set(range(90)) - skipped

    # Bitwise equal to the same run on clean text with those steps skipped.
    clean = guard_recipe(workspace, tmp_path, workspace / "tokens", "train.guard.policy=rollback")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpikeDetector, "check", lambda self, step, *rest: "injected" if step in spikes else None)
        assert losses(trained(clean)) == losses(run)


def test_a_crash_after_a_rollback_loses_nothing(
    workspace: Path, tmp_path: Path, poisoned: Path, rolled_back: Run
) -> None:
    recipe = guard_recipe(workspace, tmp_path, poisoned, "train.guard.policy=rollback")
    crashed(recipe, 66)
    assert train(recipe).resumed_at == 65
    assert losses(Run.open(recipe.run_dir)) == losses(rolled_back)


def test_policy_skip_skips_the_update(workspace: Path, tmp_path: Path, poisoned: Path) -> None:
    recipe = guard_recipe(workspace, tmp_path, poisoned, "train.guard.policy=skip", "train.steps=60")
    weights: list[torch.Tensor] = []  # before each update
    hooks = TrainerHooks(on_gradients=lambda model: weights.append(next(model.model.parameters()).detach().clone()))
    spikes = {event["step"] for event in events(trained(recipe, hooks), "spike")}
    assert spikes == set(GARBAGE)
    assert {step for step, pair in enumerate(pairwise(weights)) if torch.equal(*pair)} == spikes


def test_a_recipe_says_how_far_off_an_outlier_is_and_policy_warn_changes_nothing(
    workspace: Path, tmp_path: Path, poisoned: Path
) -> None:
    spikes, found = [], []
    for options in ([], ["train.guard.threshold=1e9"]):
        recipe = guard_recipe(workspace, tmp_path / str(len(spikes)), poisoned, "train.steps=76", *options)
        run = trained(recipe)
        spikes.append({event["step"] for event in events(run, "spike")})
        found.append(losses(run))
    assert spikes[0] & {*NEWLINES}
    assert spikes[0] & {*GARBAGE}
    assert spikes[1] == set()
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def clean(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(guard_recipe(workspace, tmp_path_factory.mktemp("clean"), workspace / "tokens", "train.steps=30"))


@pytest.mark.parametrize("times", [1, 2])
def test_a_non_finite_step_is_repeated_before_its_data_is_skipped(
    times: int, workspace: Path, tmp_path: Path, clean: Run
) -> None:
    recipe = guard_recipe(workspace, tmp_path, workspace / "tokens", "train.steps=30", "train.guard.policy=rollback")
    steps: list[int] = []

    def spoil(model: ParallelModel) -> None:
        if steps[-1] == 17 and steps.count(17) <= times:
            next(model.model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]

    run = trained(recipe, TrainerHooks(on_batch=lambda batch: steps.append(batch.step), on_gradients=spoil))
    if times == 1:
        assert losses(run) == losses(clean)
    else:
        assert set(losses(run)) == set(range(30)) - set(range(15, 23))


def test_a_loss_that_never_recovers_stops_the_run(workspace: Path, tmp_path: Path) -> None:
    recipe = guard_recipe(workspace, tmp_path, workspace / "tokens", "train.guard.policy=skip", "train.steps=40")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpikeDetector, "check", lambda self, step, *rest: "injected" if step > 5 else None)
        with pytest.raises(Z2aError, match="20 outlier steps in a row, the last 26"):
            train(recipe)


def train_on_rank(recipe: Recipe) -> None:
    train(recipe)


@pytest.mark.slow
def test_all_ranks_decide_the_same(workspace: Path, tmp_path: Path, poisoned: Path) -> None:
    recipe = guard_recipe(workspace, tmp_path, poisoned, "train.guard.policy=rollback", "parallel.dp_shard=2")
    run_ranks(2, train_on_rank, recipe)
    run = Run.open(recipe.run_dir)
    spikes = [event["step"] for event in events(run, "spike")]
    assert [spikes[0] in GARBAGE, spikes[1] in NEWLINES, len(spikes)] == [True, True, 2]
    skipped = {step for first in spikes for step in range(first - DETECTION_DELAY, first - DETECTION_DELAY + 8)}
    assert set(losses(run)) == set(range(90)) - skipped


class FakeDataset:
    """Records the samples whose documents are looked up: each lookup reads two files of a shard."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def documents(self, start: int, stop: int) -> list[DocumentSpan]:
        self.read += range(start, stop)
        return [DocumentSpan(sample, f"{sample:04x}", "web", "", "s-0", 0, 0, 9) for sample in range(start, stop)]


def handle_spike(rank: int, batch: tuple[int, int]) -> tuple[FakeDataset, list[dict[str, Any]]]:
    dataset, events = FakeDataset(), []
    record: Any = SimpleNamespace(event=lambda kind, **values: events.append({"event": kind, **values}))
    objective = SimpleNamespace(plugin=SimpleNamespace(is_around_zero=False))
    job: Any = SimpleNamespace(
        recipe=SimpleNamespace(train=SimpleNamespace(objective=objective)),
        guard=SimpleNamespace(check=lambda *_: "loss 9", recipe=SimpleNamespace(policy="warn")),
        model=SimpleNamespace(loss_scaler=None),
        mesh=SimpleNamespace(rank=rank),
        recorder=SimpleNamespace(record=record),
        run=SimpleNamespace(directory="runs/a"),
    )
    result: Any = SimpleNamespace(loss=9.0, grad_norm=1.0, layer_norms=[])
    stage = SimpleNamespace(dataset=dataset, first_step=0)
    step: Any = SimpleNamespace(step=7, stage=stage, sample_range=batch)
    assert SpikePolicy(job, Progress()).decide(step, result) == "update"
    return dataset, events


@pytest.mark.parametrize("rank", [1, 7])
def test_only_rank_0_looks_up_the_documents_of_a_spike(rank: int) -> None:
    dataset, events = handle_spike(rank, (0, 1024))
    assert dataset.read == []
    assert events == []  # every rank sees the same spike, so only the record of rank 0 has it


def test_a_spike_in_a_large_batch_reads_a_bounded_sample_of_it() -> None:
    dataset, [event] = handle_spike(0, (4096, 8192))
    assert len(dataset.read) == MAX_SAMPLES_READ
    assert set(dataset.read) <= set(range(4096, 8192))
    assert max(dataset.read) - min(dataset.read) > 4000  # over the full batch, not its first rows
    assert event["documents"]


def test_all_documents_of_a_small_batch_are_named() -> None:
    dataset, [event] = handle_spike(0, (8, 16))
    assert dataset.read == list(range(8, 16))
    assert {document["gid"] for document in event["documents"]} == {f"{sample:04x}" for sample in range(8, 16)}


@pytest.mark.parametrize("factor", [1000.0, math.nan], ids=["spike", "not finite"])
def test_the_event_of_a_spike_has_the_gradient_norm_of_each_layer(
    workspace: Path, tmp_path: Path, factor: float
) -> None:
    """The gradient of layer 1 is wrong at one step: the event shows which layer, before clipping."""
    steps = iter(range(100))

    def spoil(model: ParallelModel) -> None:
        if next(steps) == 40:
            for name, weight in model.model.named_parameters():
                if name.startswith("layers.1.") and weight.grad is not None:
                    weight.grad *= factor

    recipe = tiny_recipe(workspace, f"out={tmp_path}", "train.steps=42", "checkpoint.every=100 steps")
    if math.isnan(factor):
        with pytest.raises(Z2aError, match="step 40"):
            train(recipe, TrainerHooks(on_gradients=spoil))
        [event] = events(Run.open(recipe.run_dir), "not finite")
        assert event["layer_norms"][1] is None
        assert event["layer_norms"][0] > 0
    else:
        train(recipe, TrainerHooks(on_gradients=spoil))
        [event] = [one for one in events(Run.open(recipe.run_dir), "spike") if one["step"] == 40]
        first, second = event["layer_norms"]
        assert second > 100 * first > 0
