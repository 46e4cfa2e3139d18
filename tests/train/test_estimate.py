"""What ``z2a plan`` says of the training of a recipe, how it knows it, and that it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from zero2all.base.machine.gpu_specs import GPUS
from zero2all.base.units import show_bytes, show_seconds
from zero2all.cli.main import app
from zero2all.model.cost.flops import flops_per_token
from zero2all.recipe import Recipe, parse_recipe, recipe_yaml
from zero2all.tokens import TokenStore
from zero2all.train import Run, step_timing, train
from zero2all.train.estimate import estimate_run
from zero2all.train.plan import Plan
from zero2all.train.show_estimate import RunEstimate, TimeEstimate

H100 = GPUS["H100"]
RECIPES = Path(__file__).parents[2] / "recipes"
UNBUILT = """
corpus: {sources: [{name: zh, paths: [zh]}, {name: en, paths: [en]}]}
tokenizer: {vocab_size: 4096}
model: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
  max_position_embeddings: 256}
train: {tokens: 1M, seq_len: 64, batch_tokens: 4096, micro_batch_tokens: 512, optimizer: {lr: 1e-3}}
"""
RAMP = "train.batch_ramp={start: 1024, over: 10 steps}"
STAGES = """train.stages=[{name: short, steps: 100},
  {name: long, tokens: 500K, seq_len: 256, schedule: {shape: linear, warmup: 0, min_lr_ratio: 0}}]"""


def unbuilt(tmp_path: Path, *overrides: str) -> Recipe:
    return parse_recipe(UNBUILT, [f"out={tmp_path / 'out'}", *overrides])


def computed(recipe: Recipe, world_size: int | None = None) -> RunEstimate:
    """Without measured steps."""
    return estimate_run(recipe, world_size, H100).estimate


def described(recipe: Recipe, world_size: int | None = None) -> tuple[RunEstimate, str]:
    run = estimate_run(recipe, world_size, H100)
    return run.estimate, "\n".join(run.lines)


def measured(recipe: Recipe, world_size: int | None = None) -> tuple[RunEstimate, str, TimeEstimate]:
    """On this machine."""
    run = estimate_run(recipe, world_size)
    assert run.estimate.time is not None
    return run.estimate, run.text, run.estimate.time


def test_what_is_known_with_tokens(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path / 'out'}", "train.document_mask=true", "train.compile=true")
    estimate, text, time = measured(recipe)
    plan = Plan(recipe, TokenStore(recipe.tokens_dir, "train"))
    assert (estimate.token_counts, estimate.steps, estimate.tokens) == ("built", 12, 12 * 256)
    assert estimate.epochs == plan.epochs_by_source()
    assert estimate.learning_rates.schedule == {
        step: recipe.train.optimizer.peak_lr * plan.stage_of(step).lr_multiplier(step) for step in range(12)
    }
    batch = estimate.stages[0].batch
    assert (batch.micro_batches, batch.ranks, batch.samples) == (2, 1, 4)
    assert "256 tokens per step = 2 micro-batches x 1 data-parallel rank x 4 samples x 32 tokens" in text
    flops = flops_per_token(recipe.model.model_copy(update={"vocab_size": 512}), 32).model
    assert estimate.flops == flops * 12 * 256
    assert time.basis == "measured"
    assert time.seconds is not None
    assert time.tokens_per_second is not None
    assert time.seconds * time.tokens_per_second == pytest.approx(12 * 256)
    assert "3 steps of 4 samples, without torch.compile" in text
    assert not any(tmp_path.iterdir()), "nothing is written"


def contents(top: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in top.rglob("*") if path.is_file()}


def test_a_run_is_as_it_was_after_it_was_planned(workspace: Path, tmp_path: Path) -> None:
    train(tiny_recipe(workspace, f"out={tmp_path}", "train.steps=5", "train.optimizer.lr=null"))
    lr = Run.open(tmp_path).recipe.train.optimizer.lr
    before = contents(tmp_path)
    words = ["plan", str(tmp_path / "run"), "train.steps=8"]
    done = CliRunner().invoke(app, [*words, "--gpu", "here", "--json"])
    assert done.exit_code == 0, done.output
    estimate = json.loads(done.stdout)["training"]
    assert (estimate["trained_steps"], estimate["steps"], estimate["learning_rates"]["lr"]) == (5, 8, lr)
    assert "--extend" in estimate["warnings"][0], "the schedule of a begun stage would change"
    assert contents(tmp_path) == before


def test_training_prints_the_same_lines(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    recipe = tiny_recipe(workspace, f"out={tmp_path}", "train.steps=3", "train.optimizer.lr=null")
    lines = estimate_run(recipe, gpu=H100).lines
    train(recipe)
    printed = capsys.readouterr().err.splitlines()
    kinds = ("chosen:", "stage main", "  256 tokens per step", "epochs of", "lr ", " " * 11 + "│", "scaling laws")
    shared = [line for line in lines if line.startswith(kinds)]
    assert len(shared) == 5 + 3
    assert set(shared) <= set(printed)


def test_without_tokens_the_rest_is_known(tmp_path: Path) -> None:
    estimate, text = described(unbuilt(tmp_path, "train.max_epochs=2", "train.mixture={zh: 1, en: 2}"))
    assert (estimate.token_counts, estimate.epochs, estimate.steps) == ("unknown", None, 244)
    assert "epochs of each source: unknown until 'z2a tokens build RECIPE'" in text
    assert estimate.flops == estimate.stages[0].flops_per_token * 244 * 4096


def test_without_tokens_the_length_in_epochs_is_unknown(tmp_path: Path) -> None:
    estimate, text, time = measured(unbuilt(tmp_path, "train.epochs=2", "train.batch_tokens=null"))
    assert (estimate.steps, estimate.tokens, estimate.flops, time.seconds) == (None, None, None, None)
    assert estimate.learning_rates.schedule is None
    assert time.tokens_per_second is not None
    assert estimate.memory_per_rank is not None
    assert estimate.memory_per_rank.total > 0
    assert "20 per parameter" in text, "the batch is chosen for the compute-optimal number of tokens"
    assert "2 epochs, number of steps unknown" in text


def test_tokens_are_estimated_from_documents(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, "train.epochs=2", f"tokens.dir={tmp_path}/none")
    built = computed(tiny_recipe(workspace, "train.epochs=2"))
    estimate, text = described(recipe)
    assert estimate.token_counts == "estimated"
    assert "(estimated from the size of the documents)" in text
    assert estimate.epochs == pytest.approx({"code": 2, "en": 2, "zh": 2}, rel=0.05)
    assert built.tokens is not None
    assert estimate.tokens is not None
    assert 0.5 < estimate.tokens / built.tokens < 2


def test_every_stage_is_a_block(tmp_path: Path) -> None:
    estimate, text = described(unbuilt(tmp_path, "train.tokens=null", RAMP, STAGES))
    short, long = estimate.stages
    assert (short.steps, short.ramp_steps, long.seq_len) == (100, 10, 256)
    assert short.tokens is not None
    assert short.tokens < 100 * 4096, "the ramp begins with fewer tokens"
    assert long.tokens is not None
    assert estimate.tokens == short.tokens + long.tokens
    assert estimate.flops == short.tokens * short.flops_per_token + long.tokens * long.flops_per_token
    assert long.flops_per_token > short.flops_per_token
    assert (short.batch.micro_batches, long.batch.micro_batches) == (8, 1), "a longer stage sets its own micro-batch"
    assert "from 1.02K tokens over the first 10 steps" in text
    assert text.count("tokens per step =") == 2


def test_a_parallel_layout_is_split_over_its_ranks(tmp_path: Path) -> None:
    layout = "parallel={tp: 2, pp: 2, dp_replicate: 2}"
    estimate, text = described(unbuilt(tmp_path, layout), 16)
    assert estimate.mesh == {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 1}
    assert "4,096 tokens per step = 2 micro-batches x 4 data-parallel ranks x 8 samples x 64 tokens" in text
    assert computed(unbuilt(tmp_path, layout)).world_size == 8, "as few as the layout allows"
    padded = computed(unbuilt(tmp_path), 3)
    assert padded.stages[0].batch.padding == 3 * 3 * 8 - 64
    assert "8 samples of every step are padding" in padded.warnings[0]


def test_of_experts_the_active_ones_are_shown(tmp_path: Path) -> None:
    moe = "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 32}"
    estimate, text, _ = measured(unbuilt(tmp_path, moe, "parallel.ep=4"))
    assert (estimate.world_size, estimate.mesh["ep"]) == (4, 4)
    assert estimate.parameters.active < estimate.parameters.total
    assert " active, " in text


def test_a_source_that_is_read_often_is_a_warning(workspace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workspace, f"out={tmp_path}", "train.epochs=5")
    estimate, text = described(recipe)
    assert len(estimate.warnings) == 3
    assert "warning: en is read for 5.0 epochs" in text


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("MAX_SAMPLE_SECONDS", 0.0, "one sample would take"),
        ("free_device_memory", lambda device, ranks: 1000, "1.00KB are free here"),
    ],
)
def test_a_machine_that_cannot_measure_says_why(
    name: str, value: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_timing, name, value)
    _, text, time = measured(unbuilt(tmp_path))
    assert (time.basis, time.seconds) == ("unknown", None)
    assert reason in text
    assert "such as --gpu h100" in text


def test_a_gpu_that_is_not_here_is_no_error(tmp_path: Path) -> None:
    estimate, text, _ = measured(unbuilt(tmp_path, "train.device=cuda"))
    assert estimate.compute_dtype == "bf16"
    assert "torch sees no GPU here" in text


def test_ranks_share_the_work_that_one_process_measures(tmp_path: Path) -> None:
    _, text, time = measured(unbuilt(tmp_path), 4)
    assert time.basis == "measured"
    assert "4 x CPU with" in text
    assert "without communication between ranks" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "here", "--price", "2"], "--price does not go with --gpu here"),
        (["--gpu", "here", "--search"], "give only one of --search and --gpu here"),
        (["--try", "--trace"], "--trace does not go with --try"),
        (["--gpu", "H1000"], "no data sheet"),
    ],
)
def test_flags_that_do_not_belong_together_are_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(recipe_yaml(unbuilt(tmp_path)), encoding="utf-8")
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "my.yaml"), *flags])
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out").exists()


def test_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "my.yaml").write_text(recipe_yaml(unbuilt(tmp_path)), encoding="utf-8")
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "my.yaml"), "--gpu", "here"])
    assert done.exit_code == 2
    assert "--gpus" in done.output


@pytest.mark.parametrize("world_size", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["25m", "85m", "300m", "1.1b"])
def test_recipes_are_valid_and_state_what_the_plan_prints(
    name: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ("zh", "en", "code"):
        (tmp_path / "data" / source).mkdir(parents=True)
        (tmp_path / "data" / source / "text.txt").write_text("text")
    path = RECIPES / f"{name}.yaml"
    checked = CliRunner().invoke(app, ["recipe", "check", str(path)])
    assert checked.exit_code == 0, checked.output
    flags = ["--gpus", str(world_size)]
    done = CliRunner().invoke(app, ["plan", str(path), *flags, "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    plan, shown = shown["plan"], shown["training"]
    memory, time = show_bytes(plan["memory"]["total"]), show_seconds(plan["run"]["hours"] * 3600)
    text = path.read_text(encoding="utf-8")
    command = " ".join(["z2a plan", f"recipes/{path.name}", *flags]) + " " * 4
    [line] = [line for line in text.splitlines() if command in line]
    assert f"at most {memory}" in line
    assert line.endswith(f", {time}")
    rates = shown["learning_rates"]
    assert f"{rates['lr']:.1e}".replace("e-0", "e-") in text
    assert f"{shown['stages'][0]['batch_tokens'] // 1024}Ki." in text
    for page in ("recipes.md", "recipes.zh-CN.md"):
        rows = (RECIPES.parent / "docs" / "evidence" / page).read_text(encoding="utf-8").splitlines()
        [row] = [row for row in rows if row.startswith(f"| [{name}.yaml](")]
        assert memory in row
        assert time in row
