from __future__ import annotations

import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.helpers import crashed, flip_a_bit, losses
from tests.conftest import tiny_recipe
from tests.train.runs import assert_same_run, ctrl_c_at, events, trained, weights
from zero2all.base.errors import Interrupted, Z2aError
from zero2all.evals import evaluate_bpb
from zero2all.model import Z2all
from zero2all.parallel import ParallelModel
from zero2all.recipe import load_recipe
from zero2all.tokenizer import train_tokenizer
from zero2all.train import Run, Trainer, TrainerHooks, trace_step, train
from zero2all.train.data_loader import Batch


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Twelve uninterrupted steps."""
    return trained(tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('uninterrupted')}"))


def test_training_learns(uninterrupted: Run) -> None:
    values = [float(loss) for loss in losses(uninterrupted).values()]
    assert len(values) == 12
    assert values[0] == pytest.approx(math.log(512), rel=0.02)
    assert values[-1] < values[0] - 0.5


def test_the_run_directory_rebuilds_the_run(uninterrupted: Run, workspace: Path, tmp_path: Path) -> None:
    recipe = load_recipe(uninterrupted.directory / "recipe.yaml", [f"out={tmp_path}"])
    assert_same_run(uninterrupted, trained(recipe))


@pytest.mark.parametrize("crash_at", [2, 4, 7, 11])
def test_a_crashed_run_resumes_bit_for_bit(crash_at: int, uninterrupted: Run, workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}")
    crashed(recipe, crash_at)
    assert train(recipe).resumed_at == crash_at // 4 * 4
    assert_same_run(uninterrupted, Run.open(tmp_path))


def test_ctrl_c_saves_the_current_step(uninterrupted: Run, workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}")
    with pytest.raises(Interrupted, match="after step 6 of 12"):
        train(recipe, hooks=ctrl_c_at(5))
    assert train(recipe).resumed_at == 6
    assert_same_run(uninterrupted, Run.open(tmp_path))


@pytest.fixture
def deferred_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Metrics are read one step late, as on a GPU; the steps that were."""
    steps: list[int] = []
    original = Trainer._train_step_deferred

    def noted(self: Trainer, batch: Batch) -> None:
        steps.append(batch.step)
        original(self, batch)

    monkeypatch.setattr("zero2all.train.trainer.DEFERRING_DEVICES", ("cpu",))
    monkeypatch.setattr(Trainer, "_train_step_deferred", noted)
    return steps


def test_deferred_metrics_change_nothing(
    uninterrupted: Run, workspace: Path, tmp_path: Path, deferred_steps: list[int]
) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}"))
    assert deferred_steps == [0, 1, 2, 4, 5, 6, 8, 9, 10], "all but those before a checkpoint and the last one"
    assert_same_run(uninterrupted, Run.open(tmp_path))


def test_a_stop_in_deferred_metrics_saves_the_state_of_its_step(
    uninterrupted: Run, workspace: Path, tmp_path: Path, deferred_steps: list[int]
) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}")
    with pytest.raises(Interrupted, match="after step 7 of 12"):
        train(recipe, hooks=ctrl_c_at(4))
    assert deferred_steps == [0, 1, 2, 4, 5]
    assert train(recipe).resumed_at == 7
    assert_same_run(uninterrupted, Run.open(tmp_path))


@pytest.mark.usefixtures("deferred_steps")
def test_a_gradient_that_is_not_finite_ends_a_run_before_a_checkpoint_has_it(workspace: Path, tmp_path: Path) -> None:
    backwards: list[int] = []

    def poison(model: ParallelModel) -> None:
        backwards.append(len(backwards))
        if len(backwards) == 6:
            next(model.model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]

    recipe = tiny_recipe(workspace, f"out={tmp_path}")
    with pytest.raises(Z2aError, match=r"step 5: loss .*, gradient norm nan; the newest checkpoint is of step 4"):
        train(recipe, hooks=TrainerHooks(on_gradients=poison))
    assert backwards == list(range(7)), "it was seen one step late"


@pytest.fixture(scope="module")
def stopped(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 8 and 9, which nobody writes to."""
    out = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Interrupted):
        train(tiny_recipe(workspace, f"out={out}", "checkpoint.every=8 steps"), hooks=ctrl_c_at(8))
    return out


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "bit": lambda shard, manifest: flip_a_bit(shard),
    "truncated": lambda shard, manifest: shard.write_bytes(shard.read_bytes()[:-10]),
    "missing": lambda shard, manifest: shard.unlink(),
    "no manifest": lambda shard, manifest: manifest.unlink(),
    "torn manifest": lambda shard, manifest: manifest.write_text('{"kind": "check'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(
    damage: str, stopped: Path, uninterrupted: Run, workspace: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    checkpoints = Run.open(tmp_path).checkpoints
    assert checkpoints.steps() == [8, 9]
    path = checkpoints.path(9)
    DAMAGES[damage](next(path.glob("*.distcp")), path / "manifest.json")
    (checkpoints.directory / "step-00000009.bak").mkdir()  # a stray directory
    assert train(tiny_recipe(workspace, f"out={tmp_path}", "checkpoint.every=8 steps")).resumed_at == 8
    assert_same_run(uninterrupted, Run.open(tmp_path))


def test_only_the_newest_checkpoints_are_kept(uninterrupted: Run) -> None:
    assert uninterrupted.checkpoints.steps() == [8, 12]


def test_micro_batches_do_not_change_the_step(uninterrupted: Run, workspace: Path, tmp_path: Path) -> None:
    run = trained(tiny_recipe(workspace, f"out={tmp_path}", "train.micro_batch_tokens=256"))
    for step, loss in losses(run).items():
        assert float(loss) == pytest.approx(float(losses(uninterrupted)[step]), abs=5e-6)


def test_a_finished_run_is_left_unchanged_and_can_be_extended(
    uninterrupted: Run, workspace: Path, tmp_path: Path
) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}"))
    before = weights(Run.open(tmp_path))
    assert train(tiny_recipe(workspace, f"out={tmp_path}")).resumed_at == 12
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(Run.open(tmp_path)).items())
    train(tiny_recipe(workspace, f"out={tmp_path}", "train.steps=14"), extend="rewarm")
    assert list(losses(Run.open(tmp_path))) == list(range(14))


def test_tokens_of_another_tokenizer_are_refused(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}", "tokenizer.vocab_size=576", f"tokenizer.dir={tmp_path}/other")
    train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
    with pytest.raises(Z2aError, match="another tokenizer"):
        train(recipe)


def test_settings_changed_on_resume_are_applied(workspace: Path, tmp_path: Path) -> None:
    """Two runs that differ only in a setting changed on resume must differ in their weights."""
    for name in "ab":
        with pytest.raises(Interrupted):
            train(tiny_recipe(workspace, f"out={tmp_path}/{name}"), hooks=ctrl_c_at(5))
    train(tiny_recipe(workspace, f"out={tmp_path}/a"))
    train(tiny_recipe(workspace, f"out={tmp_path}/b", "train.optimizer.weight_decay=9"), extend="as-planned")
    one, other = (weights(Run.open(tmp_path / name)) for name in "ab")
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_a_non_finite_loss_stops_the_run_before_the_update(workspace: Path, tmp_path: Path) -> None:
    steps = iter(range(12))

    def poison(model: ParallelModel) -> None:
        if next(steps) == 8:
            model.model.lm_head.weight.data.fill_(float("inf"))

    recipe = tiny_recipe(workspace, f"out={tmp_path}")
    with pytest.raises(Z2aError, match=r"step 9: loss nan.*newest checkpoint is of step 8"):
        train(recipe, hooks=TrainerHooks(on_gradients=poison))
    assert train(recipe).resumed_at == 8


def test_a_run_opens_from_anywhere_and_after_a_move(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    train(tiny_recipe(workspace, "out=made", "train.steps=1"))
    (tmp_path / "here" / "made").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    run = Run.open("moved")
    run.load_model()
    assert run.tokenizer().fingerprint == run.identity().tokenizer
    assert trace_step(run, 0)["documents"]


def test_a_changed_token_store_is_not_traced(workspace: Path, tmp_path: Path) -> None:
    shutil.copytree(workspace / "tokens", tmp_path / "tokens")
    train(tiny_recipe(workspace, f"out={tmp_path}", f"tokens.dir={tmp_path}/tokens", "train.steps=1"))
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    manifest["splits"]["train"]["zh"]["sha256"] = ["other"]
    (tmp_path / "tokens" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Z2aError, match="has changed since this run"):
        trace_step(Run.open(tmp_path), 0)


def test_fp16_skips_updates_that_overflow(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.parallel.loss_scale.INITIAL_SCALE", 2.0**40)
    recipe = tiny_recipe(workspace, f"out={tmp_path}", "train.precision=fp16", "train.steps=60")
    run = trained(recipe)
    overflows = [event["step"] for event in events(run, "overflow")]
    values = [float(loss) for loss in losses(run).values()]
    first = next(step for step in range(60) if step not in overflows)
    assert 5 < first < 40
    assert values[first] == pytest.approx(values[0], rel=0.02)  # nothing was learned from steps that overflowed
    assert values[-1] < values[0] - 0.5
    assert run.checkpoints.read_state(60).loss_scale.value == 2.0 ** (40 - len(overflows))


def test_an_overflow_at_the_smallest_scale_is_not_skipped(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero2all.parallel.loss_scale.INITIAL_SCALE", 2.0**40)
    monkeypatch.setattr("zero2all.parallel.loss_scale.MIN_SCALE", 2.0**37)
    with pytest.raises(Z2aError, match=r"step 3: loss .* gradient norm (nan|inf)"):
        train(tiny_recipe(workspace, f"out={tmp_path}", "train.precision=fp16"))


def test_a_finished_run_frees_its_model(workspace: Path, tmp_path: Path) -> None:
    models: list[weakref.ref[Z2all]] = []
    hooks = TrainerHooks(on_gradients=lambda model: models.append(weakref.ref(model.model)))
    train(tiny_recipe(workspace, f"out={tmp_path}", "train.steps=1"), hooks)
    assert [model() for model in models] == [None]


def test_samples_that_cannot_be_generated_do_not_end_the_run(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*words: object, **options: object) -> str:
        raise torch.OutOfMemoryError("no memory for the KV cache")

    monkeypatch.setattr("zero2all.train.samples.generate_batch", out_of_memory)
    recipe = tiny_recipe(workspace, f"out={tmp_path}", "train.steps=4", "evals.every=2 steps")
    assert train(recipe, evaluate=evaluate_bpb).steps == 4
    assert capsys.readouterr().err.count("no samples at this validation: no memory for the KV cache") == 2
