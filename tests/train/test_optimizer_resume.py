"""Runs with weights in bf16, Adafactor, Muon and 8-bit AdamW: resumed bit by bit, refused, exported, started from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.helpers import losses
from tests.conftest import tiny_recipe
from tests.train.runs import assert_same_run, ctrl_c_at
from zero2all.base.errors import Interrupted, RecipeError
from zero2all.bench.rank_harness import run_ranks
from zero2all.checkpoint import CheckpointWeights
from zero2all.evals import evaluate_bpb
from zero2all.export import export_run
from zero2all.generation import SamplingParams, generate_batch
from zero2all.model import load_hf
from zero2all.recipe import Recipe
from zero2all.track.record_lines import SampleLine
from zero2all.track.run_record import read_record_lines
from zero2all.train import Run, train

BF16 = ["train.optimizer.name=adamw-bf16", "train.precision=bf16"]
KAHAN = ["train.optimizer.name=adamw-bf16-kahan", "train.precision=bf16"]
MOE = "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16}"
OPTIMIZERS = {
    "stochastic": [*BF16, MOE],
    "kahan": KAHAN,
    "adafactor": ["train.optimizer.name=adafactor", MOE],
    "adamw-8bit": ["train.optimizer.name=adamw-8bit", "model.hidden_size=64"],
    "muon": ["train.optimizer.name=muon"],
}


@pytest.mark.parametrize(
    ("name", "flash"),
    [
        ("stochastic", True),
        ("kahan", False),
        ("adafactor", False),
        ("muon", False),
        pytest.param("adamw-8bit", False, marks=pytest.mark.long),
        pytest.param("adafactor", True, marks=pytest.mark.long),
        pytest.param("kahan", True, marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_has_the_same_bits(
    name: str, flash: bool, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "adamw-8bit":
        pytest.importorskip("torchao", reason="needs pip install 'zero2all[quant]'")
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which would take a minute
    options = ["train.steps=8", *(["checkpoint.flash_every=1 steps"] if flash else []), *OPTIMIZERS[name]]
    train(tiny_recipe(workspace, f"out={tmp_path}/a", *options))
    recipe = tiny_recipe(workspace, f"out={tmp_path}/b", *options)
    with pytest.raises(Interrupted):
        train(recipe, hooks=ctrl_c_at(4))
    assert train(recipe).resumed_at == 5
    assert_same_run(Run.open(tmp_path / "a"), Run.open(tmp_path / "b"))


@pytest.fixture(scope="module")
def trained(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with weights in bf16, and a validation with samples."""
    out = tmp_path_factory.mktemp("bf16")
    options = ["train.steps=4", "evals.every=4 steps", *BF16, f"out={out}"]
    train(tiny_recipe(workspace, *options), evaluate=evaluate_bpb)
    return out


def test_a_checkpoint_in_bf16_is_read_everywhere(trained: Path, workspace: Path, tmp_path: Path) -> None:
    run = Run.open(trained)
    samples = [line for line in read_record_lines(run.record_path) if isinstance(line, SampleLine)]
    assert samples, "generated while it was trained"
    stored = CheckpointWeights(run.checkpoints.path(4))
    assert stored.dtype == "bfloat16"
    model = run.load_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    export_run(run, tmp_path / "f32", check=False)
    for name, weight in load_hf(tmp_path / "f32").state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    export_run(run, tmp_path / "bf16", dtype="bf16", check=False)  # as they are, so nothing is lost
    exported = {name: t for path in (tmp_path / "bf16").glob("*.safetensors") for name, t in load_file(path).items()}
    assert torch.equal(exported["lm_head.weight"].float(), model.lm_head.weight)
    [completion] = generate_batch(model, run.tokenizer(), ["the model"], SamplingParams(max_tokens=4))
    assert completion.text
    # Weights travel through train.init, in both directions.
    for name, options in (("fp32", []), ("again", BF16)):
        recipe = tiny_recipe(
            workspace, f"out={tmp_path}/{name}", "train.steps=1", "train.optimizer.lr=1e-30", f"train.init={trained}",
            "train.optimizer.weight_decay=0", *options,
        )  # fmt: skip
        train(recipe)
        for key, tensor in Run.open(tmp_path / name).load_model().state_dict().items():
            assert torch.equal(tensor, model.state_dict()[key]), (name, key)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_precision_that_weights_in_bf16_cannot_have_is_a_mistake(precision: str, workspace: Path) -> None:
    with pytest.raises(RecipeError, match=f"precision: {precision} cannot compute with them"):
        tiny_recipe(workspace, BF16[0], f"train.precision={precision}")
    assert tiny_recipe(workspace, BF16[0], "train.precision=auto").train.compute_precision == "bf16"


def trained_on_ranks(recipe: Recipe) -> None:
    train(recipe)


@pytest.mark.long
@pytest.mark.parametrize(("name", "tolerance"), [("adafactor", 5e-6), ("stochastic", 0.02)])
def test_a_run_is_resumed_on_two_ranks(name: str, tolerance: float, workspace: Path, tmp_path: Path) -> None:
    """Factors of Adafactor are cut and replicated as the new layout needs them."""
    options = ["train.steps=8", *OPTIMIZERS[name]]
    train(tiny_recipe(workspace, f"out={tmp_path}/a", *options))
    recipe = tiny_recipe(workspace, f"out={tmp_path}/b", *options)
    with pytest.raises(Interrupted):
        train(recipe, hooks=ctrl_c_at(4))
    run_ranks(2, trained_on_ranks, recipe, seconds=240)
    found, expected = ([float(loss) for loss in losses(tmp_path / name).values()] for name in "ba")
    assert found == pytest.approx(expected, rel=0, abs=tolerance)
