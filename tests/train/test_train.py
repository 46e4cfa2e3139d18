from __future__ import annotations

import math
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.errors import Interrupted, UsageError, Z2aError
from zero2all.model import Z2all
from zero2all.recipe import ModelConfig, OptimizerRecipe, load_recipe
from zero2all.tokenizer import train_tokenizer
from zero2all.track import read_steps
from zero2all.train import Run, train
from zero2all.train.optimizer import build_optimizer
from zero2all.train.schedule import learning_rate


def losses(run: Run) -> dict[int, str]:
    """What was written down, digit for digit."""
    return {step: repr(values["loss"]) for step, values in read_steps(run.record_path).items()}


def weights(run: Run) -> dict[str, torch.Tensor]:
    return run.load_model().state_dict()


def assert_same_run(one: Run, other: Run) -> None:
    assert losses(one) == losses(other)
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name]), name


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Twelve undisturbed steps."""
    recipe = tiny_recipe(world, f"out={tmp_path_factory.mktemp('whole')}")
    train(recipe)
    return Run.open(recipe.run_dir)


def test_training_learns(whole: Run) -> None:
    values = [float(loss) for loss in losses(whole).values()]
    assert len(values) == 12
    assert values[0] == pytest.approx(math.log(512), rel=0.02)
    assert values[-1] < values[0] - 0.5


def test_the_run_directory_rebuilds_the_run(whole: Run, world: Path, tmp_path: Path) -> None:
    recipe = load_recipe(whole.directory / "recipe.yaml", [f"out={tmp_path}"])
    train(recipe)
    assert_same_run(whole, Run.open(tmp_path))


@pytest.mark.parametrize("crash_at", [2, 4, 7, 11])
def test_a_run_that_crashed_goes_on_bit_for_bit(crash_at: int, whole: Run, world: Path, tmp_path: Path) -> None:
    class CrashError(Exception):
        pass

    def crash(step: int, batch: torch.Tensor) -> None:
        if step == crash_at:
            raise CrashError

    recipe = tiny_recipe(world, f"out={tmp_path}")
    with pytest.raises(CrashError):
        train(recipe, on_batch=crash)
    assert train(recipe)["resumed_at"] == crash_at // 4 * 4
    assert_same_run(whole, Run.open(tmp_path))


def ctrl_c_at(when: int) -> Callable[[int, torch.Tensor], None]:
    return lambda step, batch: signal.raise_signal(signal.SIGINT) if step == when else None


def test_ctrl_c_saves_the_step_in_hand(whole: Run, world: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(world, f"out={tmp_path}")
    with pytest.raises(Interrupted, match="after step 6 of 12"):
        train(recipe, on_batch=ctrl_c_at(5))
    assert train(recipe)["resumed_at"] == 6
    assert_same_run(whole, Run.open(tmp_path))


@pytest.mark.parametrize("damage", ["bit", "cut", "missing", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, whole: Run, world: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(world, f"out={tmp_path}", "checkpoint.every=8 steps")
    with pytest.raises(Interrupted):
        train(recipe, on_batch=ctrl_c_at(8))
    run = Run.open(tmp_path)
    assert run.checkpoints.steps() == [8, 9]
    shard = next(run.checkpoints.path(9).glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(data[:-10])
    elif damage == "missing":
        shard.unlink()
    else:
        (run.checkpoints.path(9) / "manifest.json").unlink()
    assert train(recipe)["resumed_at"] == 8
    assert_same_run(whole, Run.open(tmp_path))


def test_only_the_newest_checkpoints_are_kept(whole: Run) -> None:
    assert whole.checkpoints.steps() == [8, 12]


def test_micro_batches_do_not_change_the_step(whole: Run, world: Path, tmp_path: Path) -> None:
    train(tiny_recipe(world, f"out={tmp_path}", "train.micro_batch_tokens=256"))
    for step, loss in losses(Run.open(tmp_path)).items():
        assert float(loss) == pytest.approx(float(losses(whole)[step]), abs=5e-6)


def test_a_finished_run_is_left_alone_and_can_be_made_longer(whole: Run, world: Path, tmp_path: Path) -> None:
    train(tiny_recipe(world, f"out={tmp_path}"))
    before = weights(Run.open(tmp_path))
    assert train(tiny_recipe(world, f"out={tmp_path}"))["resumed_at"] == 12
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(Run.open(tmp_path)).items())
    train(tiny_recipe(world, f"out={tmp_path}", "train.steps=14"))
    assert list(losses(Run.open(tmp_path))) == list(range(14))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("seed=12", "samples"),
        ("train.seq_len=16", "samples"),
        ("model.n_layers=3", "model"),
        ("train.batch_tokens=128", "batch_samples"),
    ],
)
def test_a_run_that_is_not_the_same_run_is_refused(change: str, named: str, world: Path, tmp_path: Path) -> None:
    train(tiny_recipe(world, f"out={tmp_path}", "train.steps=2"))
    with pytest.raises(UsageError, match=named):
        train(tiny_recipe(world, f"out={tmp_path}", "train.steps=4", change))


def test_tokens_of_another_tokenizer_are_refused(world: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(world, f"out={tmp_path}", "tokenizer.vocab_size=576", f"tokenizer.dir={tmp_path}/other")
    train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
    with pytest.raises(Z2aError, match="another tokenizer"):
        train(recipe)


def test_learning_rate_has_its_closed_form() -> None:
    rates = [learning_rate(step, total=101, warmup=10, peak=2.0, final=0.1) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_only_matrices_decay() -> None:
    model = Z2all(ModelConfig(vocab_size=64, qkv_bias=True, qk_norm=True))
    decayed, free = build_optimizer(model, OptimizerRecipe(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(p)].endswith(("norm.weight", "bias")) for p in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(names)
