"""``z2a bench profile``: what is slow is named, numbers agree with formulas, and runs of the recipe are left alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError
from zero2all.bench.profile import Profile, format_profile, profile_recipe
from zero2all.bench.profile.memory import thin_out
from zero2all.bench.profile.report import RankTimes, slow_rank, suggest
from zero2all.bench.rank_harness import run_ranks
from zero2all.cli.main import app
from zero2all.model.cost.flops import flops_per_token
from zero2all.model.z2all import Block
from zero2all.recipe import Recipe, recipe_yaml
from zero2all.train import train
from zero2all.train.step_timer import PARTS, StepTime

SLOW = 0.4  # seconds, many times a step
PARAMETERS = 51_360


def slowed(original: Callable[..., Any], seconds: float = SLOW) -> Any:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    return slow


@pytest.fixture(scope="module")
def plain(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    out = tmp_path_factory.mktemp("profile")
    recipe = tiny_recipe(workspace, f"out={out}", "train.document_mask=false")
    train(recipe)
    before = {path: path.stat().st_mtime_ns for path in recipe.run_dir.rglob("*")}
    (out / "recipe.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
    done = CliRunner().invoke(app, ["bench", "profile", str(out / "recipe.yaml"), "--steps", "2"])
    assert done.exit_code == 0, done.output
    assert "a step takes" in done.stdout
    after = {path: path.stat().st_mtime_ns for path in recipe.run_dir.rglob("*")}
    assert after == before, "the run and its checkpoints are as they were"
    found = profile_recipe(recipe, 2)  # again, over the one before
    assert found is not None
    assert found.directory == str(out / "profile")
    return found


def test_its_files(plain: Profile) -> None:
    directory = Path(plain.directory)
    names = {"memory.json", "operators.json", "profile.json", "summary.txt", "trace.json"}
    assert {path.name for path in directory.iterdir()} == names, "the run that was measured is gone"
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    points = json.loads((directory / "memory.json").read_text())["points"]
    assert max(size for _, size in points) == pytest.approx(plain.memory.total, rel=0.011)
    assert (directory / "summary.txt").read_text("utf-8") == format_profile(plain) + "\n"
    operators = json.loads((directory / "operators.json").read_text())["operators"]
    assert sum(row["share"] for row in operators) == pytest.approx(1)
    assert [row["seconds"] for row in operators] == sorted((row["seconds"] for row in operators), reverse=True)


def test_flops_are_those_of_the_model(plain: Profile, workspace: Path) -> None:
    config = tiny_recipe(workspace, "model.vocab_size=512").model
    assert plain.flops == pytest.approx(256 * flops_per_token(config, 32).model, rel=0.05)


def test_the_peak_of_memory_is_what_it_consists_of(plain: Profile) -> None:
    peak = plain.memory
    assert peak.parameters == 4 * PARAMETERS
    assert peak.optimizer == pytest.approx(8 * PARAMETERS, rel=0.01)  # and the number of the step of each parameter
    assert 0 < peak.gradients <= 4 * PARAMETERS
    assert peak.activations > 4 * 2 * 4 * 32 * 32, "at least the stream of both layers for 4 samples of 32 tokens"
    assert peak.gathered == 0
    parts = peak.parameters + peak.gradients + peak.optimizer + peak.activations + peak.other
    assert parts == peak.total
    assert peak.other < 0.3 * peak.total


def test_the_shares_add_up(plain: Profile) -> None:
    assert sum(plain.shares.values()) == pytest.approx(1)
    assert set(plain.shares) == {*PARTS}


def test_slow_parts_are_named(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader reads ahead, so that it is waited for longer than the optimizer takes."""
    from zero2all.train.data_loader import read_batch

    monkeypatch.setattr("zero2all.train.data_loader.read_batch", slowed(read_batch, 2 * SLOW))
    monkeypatch.setattr(torch.optim.AdamW, "step", slowed(torch.optim.AdamW.step))
    found = profile_recipe(tiny_recipe(workspace), 2, tmp_path / "out")
    assert found is not None
    data, optimizer, *_ = (finding.why for finding in found.suggestions)
    assert "waiting for data: the loader is slower than the model" in data
    assert "of the step is the optimizer" in optimizer
    assert found.shares["optimizer"] > 0.3


def profile_with_a_slow_rank(recipe: Recipe) -> Profile | None:
    if dist.get_rank() == 1:
        Block.forward = slowed(Block.forward, SLOW / 8)  # type: ignore[method-assign]  # of this process
    return profile_recipe(recipe, 2)


def test_one_slow_rank_of_two_is_named(workspace: Path, tmp_path: Path) -> None:
    found, other = run_ranks(2, profile_with_a_slow_rank, tiny_recipe(workspace, f"out={tmp_path}"))
    assert other is None
    assert len(found.ranks) == 2
    [suggestion] = [finding for finding in found.suggestions if finding.what == "rank 1"]
    assert suggestion.why.startswith("slow, and the others wait for it: forward takes")
    text = format_profile(found)
    assert "rank 0 " in text
    assert "rank 1 " in text
    assert found.ranks[0].parts["communication"] > found.ranks[1].parts["communication"]
    assert found.memory.parameters == pytest.approx(2 * PARAMETERS, rel=0.01), "half of them"
    assert found.memory.gathered > 0


def test_another_directory_and_a_short_recipe_are_refused(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="holds something else than a profile"):
        profile_recipe(tiny_recipe(workspace), 2, tmp_path)
    with pytest.raises(UsageError, match=r"has 3 steps, and --steps 5 needs 12: raise train.steps or lower --steps"):
        profile_recipe(tiny_recipe(workspace, "train.steps=3"), 5, tmp_path / "out")
    assert not (tmp_path / "out" / "profiled-run").exists()


# The rules alone

BASE: dict[str, float] = {"data": 0.0, "forward": 3.0, "loss": 1.0, "backward": 5.0, "optimizer": 1.0, "logging": 0.1}


def times(*changes: dict[str, float]) -> RankTimes:
    ranks = []
    for change in changes:
        parts: dict[Any, float] = dict.fromkeys(PARTS, 0.0) | BASE | change
        ranks.append(StepTime(sum(parts.values()), parts))
    return RankTimes(ranks)


@pytest.mark.parametrize(
    ("parallel", "changes", "expected"),
    [
        ([], [{}], []),
        ([], [{"data": 2.0}], ["waiting for data"]),
        ([], [{"optimizer": 6.0}], ["a larger train.batch_tokens"]),
        ([], [{"logging": 1.0}], ["raise track.log_every"]),
        ([], [{"loss": 8.0}], ["a smaller tokenizer.vocab_size"]),
        ([], [{"other": 4.0}], ["train.compile=true"]),
        (["parallel.dp_shard=2"], [{"communication": 6.0}] * 2, ["parallel.reshard_after_forward=never"]),
        (
            ["parallel.dp_shard=2", "parallel.reshard_after_forward=never"],
            [{"communication": 6.0}] * 2,
            ["parallel.zero=1"],
        ),
        (["parallel.dp_replicate=2"], [{"communication": 6.0}] * 2, ["all-reduced once per step"]),
        (["parallel.pp=2"], [{"communication": 6.0}] * 2, ["more micro-batches"]),
        (["parallel.tp=2"], [{"communication": 6.0}] * 2, ["inside a node"]),
        # A slow rank explains what the others wait for.
        (["parallel.dp_shard=2"], [{"communication": 6.0}, {"backward": 11.0}], ["rank 1: slow"]),
        (["parallel.dp_shard=3"], [{"data": 4.0}, {"communication": 4.0}, {"communication": 4.0}], ["rank 0", "data"]),
        # At most three.
        ([], [{"data": 9.0, "optimizer": 9.0, "logging": 9.0, "other": 9.0}], ["data", "optimizer", "logging"]),
    ],
)
def test_rules(parallel: list[str], changes: list[dict[str, float]], expected: list[str], workspace: Path) -> None:
    found = suggest(times(*changes), tiny_recipe(workspace, *parallel))
    assert len(found) == len(expected), found
    for finding, part in zip(found, expected, strict=True):
        assert part in str(finding)


def test_equal_ranks_have_no_slow_one() -> None:
    assert slow_rank(times({}, {"forward": 3.2}, {})) is None
    assert slow_rank(times({})) is None


def test_a_timeline_keeps_its_peaks() -> None:
    points = [(float(at), at % 7) for at in range(700)]
    thinned = thin_out(points, 100)
    assert len(thinned) == 100
    assert {size for _, size in thinned} == {6}
