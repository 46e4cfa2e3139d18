"""Adapters: what is trained, that they start as the base model, and that merging changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.helpers import losses
from tests.conftest import tiny_recipe
from tests.train.runs import trained
from zero2all.base.errors import RecipeError, UsageError
from zero2all.export import export_adapter_of_run, export_run
from zero2all.model import Z2all
from zero2all.model.lora import LoRALinear, adapters, merge_adapters
from zero2all.recipe import ModelConfig, Recipe
from zero2all.train import Run, train


@pytest.fixture(scope="module")
def base(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('base')}", "train.steps=4"))


def lora_recipe(workspace: Path, base: Run, out: Path, *overrides: str) -> Recipe:
    return tiny_recipe(
        workspace, f"out={out}", f"train.init={base.directory}", "model.lora={rank: 4}", "train.steps=24",
        "checkpoint.every=12 steps", *overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tuned(workspace: Path, base: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(lora_recipe(workspace, base, tmp_path_factory.mktemp("lora")))


TOKENS = torch.arange(3, 40)[None] % 500


def test_only_adapters_are_trained_and_the_first_loss_is_that_of_the_base_model(
    workspace: Path, base: Run, tuned: Run, tmp_path: Path
) -> None:
    full = trained(tiny_recipe(workspace, f"out={tmp_path}", f"train.init={base.directory}", "train.steps=1"))
    assert float(losses(tuned)[0]) == pytest.approx(float(losses(full)[0]), abs=1e-6)
    values = [float(loss) for loss in losses(tuned).values()]
    assert sum(values[-6:]) < sum(values[:6])
    before, after = base.load_model().state_dict(), tuned.load_model().state_dict()
    assert set(after) - set(before) == {name for name in after if ".lora_" in name}
    assert len([name for name in after if name.endswith("lora_B")]) == 2 * 7
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(after[name].abs().max() > 0 for name in after if name.endswith("lora_B"))
    states = [path for path in tuned.checkpoints.path(24).iterdir() if path.suffix == ".distcp"]
    matrices = sum(weight.numel() for name, weight in after.items() if ".lora_" in name)
    everything = sum(weight.numel() for weight in after.values())
    # Weights, and two moments of the adapters alone.
    assert sum(path.stat().st_size for path in states) < 4 * (everything + 2 * matrices) * 1.3 + 200_000


@torch.inference_mode()
def test_merging_changes_no_logit_in_fp32_and_little_in_bf16(tuned: Run) -> None:
    model, merged = tuned.load_model(), tuned.load_model()
    merge_adapters(merged)
    assert all(not module.lora_B.any() for _, module in adapters(merged))
    assert (model(TOKENS) - merged(TOKENS)).abs().max() < 1e-5
    rounded = {name: weight.to(torch.bfloat16).float() for name, weight in merged.state_dict().items()}
    in_half = tuned.load_model()
    in_half.load_state_dict(rounded)
    plain = tuned.load_model()
    plain.load_state_dict({name: weight.to(torch.bfloat16).float() for name, weight in plain.state_dict().items()})
    error = (in_half(TOKENS) - model(TOKENS)).abs().max()
    # Rounding merged weights costs no more than rounding weights and adapters apart.
    assert error < 2 * (plain(TOKENS) - model(TOKENS)).abs().max() + 1e-3


def test_an_export_has_the_merged_weights(tuned: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = export_run(tuned, tmp_path / "hf", check=True)
    assert result.max_difference < 1e-4


def test_the_adapter_alone_has_the_names_of_peft(tuned: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    export_adapter_of_run(tuned, tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(weights[name], tuned.load_model().state_dict()["layers.0.self_attn.q_proj.lora_A"])
    assert len(weights) == 2 * 2 * 7


def test_a_run_without_adapters_has_none_to_export(base: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no adapters"):
        export_adapter_of_run(base, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_unmerged_adapters_are_no_initial_weights_of_another_model(workspace: Path, tuned: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="adapters"):
        train(tiny_recipe(workspace, f"out={tmp_path}/full", f"train.init={tuned.directory}", "train.steps=1"))
    train(lora_recipe(workspace, tuned, tmp_path / "more", "train.steps=1"))


def test_mistakes_are_named(workspace: Path, base: Run, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"set train\.init"):
        tiny_recipe(workspace, f"out={tmp_path}", "model.lora={rank: 4}")
    with pytest.raises(RecipeError, match="not sharded by tp"):
        lora_recipe(workspace, base, tmp_path, "parallel.tp=2")


def test_a_matrix_without_an_adapter_stays_plain() -> None:
    lora = {"target_modules": ["q_proj"]}
    model = Z2all(ModelConfig.model_validate({"vocab_size": 64, "num_hidden_layers": 1, "lora": lora}))
    assert [name for name, _ in adapters(model)] == ["layers.0.self_attn.q_proj"]
    assert not isinstance(model.layers[0].self_attn.k_proj, LoRALinear)
