"""Questions about a large training run that ``z2a plan`` answers, through the command that a user types."""

from __future__ import annotations

import pytest

from tests.planner.commands import plan_json, plan_text
from zero2all.base.machine.gpu_specs import GPUS
from zero2all.base.units import show_bytes
from zero2all.model.cost.shape_advice import advise_shapes
from zero2all.planner.rank_plan import HOST_MEMORY
from zero2all.recipe import load_recipe_or_preset

GPT3 = (
    "model={hidden_size: 12288, intermediate_size: 32768, num_hidden_layers: 96, num_attention_heads: 96, "
    "num_key_value_heads: 96, max_position_embeddings: 2048, vocab_size: 51200}"
)


def test_the_walls_of_gpt_3() -> None:
    """314 ZFLOP of computation, 700 GB of fp32 weights, 89.6 TB of gradients of 128 replicas in a step."""
    words = ["z2all-1.1b", GPT3, "parallel={tp: 8}", "train.seq_len=2048", "--gpus", "1024", "--tokens", "300B"]
    found = plan_json(*words)["plan"]
    assert found["run"]["flops"] == pytest.approx(314e21, rel=0.05)
    assert found["inference"]["weights"]["fp32"] == pytest.approx(700e9, rel=0.01)
    assert found["traffic"]["replicas"] == 128
    assert found["traffic"]["gradients"] == pytest.approx(89.6e12, rel=0.01)
    assert found["traffic"]["sent"] > 0


def test_bytes_to_load_and_to_train_70b() -> None:
    """6 GB per billion parameters load a model in mixed precision, and do not train it."""
    shown = plan_text("70b", "--gpus", "1024")
    assert "to load the model: 138GB in bf16, 414GB with fp32 weights beside (6 GB per billion parameters)" in shown
    assert "to train it: 1.24TB and activations" in shown
    assert "weights 138GB, gradients 138GB, optimizer 828GB" in shown


def test_groups_of_operations_differ_in_intensity() -> None:
    """Matrix products are limited by computation; norms have more FLOPs per byte than element-wise operations."""
    parts = {part["name"].partition(":")[0]: part for part in plan_json("7b", "--gpus", "8")["plan"]["step"]["parts"]}
    products, norms, elements = (parts[name] for name in ("feed-forward", "norms", "element-wise"))
    assert products["intensity"] > 100 * norms["intensity"]
    assert norms["intensity"] > elements["intensity"] > 0
    assert (products["bound"], norms["bound"], elements["bound"]) == ("compute", "memory", "memory")


def test_sequence_parallelism_sends_as_much_as_tensor_parallelism_alone() -> None:
    words = ["7b", "parallel.tp=8", "--gpus", "8"]
    with_sp, without = ([one for one in plan_json(*words, sp)["plan"]["step"]["traffic"] if one["dimension"] == "tp"]
                        for sp in ("parallel.sp=true", "parallel.sp=false"))  # fmt: skip
    assert with_sp[0]["what"] != without[0]["what"]
    assert with_sp[0]["bytes"] == without[0]["bytes"] > 0


def test_mfu_is_counted_against_the_peak_of_each_format() -> None:
    """In float8 the projections have twice the peak, so the share of the peak is lower than against bf16 alone."""
    bf16 = plan_json("7b", "--gpus", "8")["plan"]["speed"]
    assert bf16["mfu_by_format"] == pytest.approx(bf16["mfu"])
    float8 = plan_json("7b", "train.float8=tensorwise", "--gpus", "8")["plan"]["speed"]
    assert 0.5 * float8["mfu"] < float8["mfu_by_format"] < 0.8 * float8["mfu"]


def test_the_context_of_cuda_depends_on_module_loading() -> None:
    [context] = [
        part for part in plan_json("7b", "--gpus", "8")["plan"]["memory"]["parts"] if part["name"] == "CUDA context"
    ]
    assert context["bytes"] == 920e6
    assert "470MB" in context["note"]
    assert "lazy loading" in context["note"]


def test_pinned_memory_is_compared_with_that_of_the_node() -> None:
    words = ["70b", "parallel.offload=cpu", "parallel.activation_checkpointing=full", "--gpus", "8"]
    pinned, shown = 8 * plan_json(*words)["plan"]["memory"]["host"], plan_text(*words)
    assert f"a node pins {show_bytes(pinned)} for that" in shown
    assert f"which no other program can use: {pinned / (8 * HOST_MEMORY):.0%} of it" in shown
    assert "which no other program can use" not in plan_text("7b", "--gpus", "8")


def test_a_head_has_to_be_large_enough_with_flash_attention() -> None:
    recipe = load_recipe_or_preset("7b", ["model.num_attention_heads=128", "model.num_key_value_heads=128"])
    [advice] = [one for one in advise_shapes(recipe, GPUS["A100"]) if one.field == "model.num_attention_heads"]
    assert advice.better == 64
    assert "with flash attention only the size of a head counts" in str(advice)


def test_a_thousand_gpus_pay_from_8192_gpu_days_on() -> None:
    """7B on 20 tokens per parameter takes far less than 8,192 GPU-days."""
    small = plan_json("7b", "--gpus", "1024", "--search")["tips"]
    assert any("a thousand GPUs pay from 8,192 on" in tip["why"] for tip in small)
