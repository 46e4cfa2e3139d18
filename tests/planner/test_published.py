"""Published numbers, each with its source. One efficiency for each kind of GPU; nothing is fitted to a case."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.commands import plan_json
from zero2all.base.machine.gpu_specs import GPUS, Gpu
from zero2all.checkpoint.checkpoint_interval import FAILURE_RATES
from zero2all.model.cost.flops import flops_per_token, palm_flops_per_token
from zero2all.planner.cluster import Cluster
from zero2all.planner.plan import Speed, bloom_tflops, speed_of
from zero2all.planner.run_cost import failure_probability
from zero2all.planner.step_time import PlannedStepTime, plan_step
from zero2all.planner.workload import Layout, Workload, largest_stage
from zero2all.recipe import ModelConfig, load_recipe_or_preset

REFERENCE = ModelConfig(preset="z2all-1.1b")
REFERENCE_PARAMETERS = 1_255_499_776


Planned = tuple[Workload, Cluster, PlannedStepTime, Speed]


def planned(gpu: str | Gpu, gpus: int, *overrides: str, stages_per_rank: int | None = None, **shape: int) -> Planned:
    """The workload, its cluster, and the plan of a step."""
    model = [f"model.{name}={value}" for name, value in shape.items()]
    tokenizer = f"tokenizer.vocab_size={shape.get('vocab_size', 64320)}"
    recipe = load_recipe_or_preset("z2all-1.1b", ["train.precision=bf16", tokenizer, *model, *overrides])
    stage = largest_stage(recipe)
    workload, layout = Workload.of(recipe, stage), Layout.of(recipe, stage, gpus)
    if stages_per_rank is not None:
        layout = replace(layout, stages_per_rank=stages_per_rank)
    cluster = Cluster.of(gpu if isinstance(gpu, Gpu) else GPUS[gpu], gpus)
    step = plan_step(workload, layout, cluster)
    return workload, cluster, step, speed_of(workload, layout, cluster, step)


def plan_of(*words: str) -> Any:
    """What a user gets from ``z2a plan``."""
    return plan_json(*words)["plan"]


SHAPE_7_5B = (
    "model={hidden_size: 4096, intermediate_size: 12944, num_hidden_layers: 32, num_attention_heads: 32, "
    "num_key_value_heads: 32, max_position_embeddings: 4096, vocab_size: 32000}"
)


def test_zero_stages_of_7_5b_on_64_gpus() -> None:
    """https://arxiv.org/abs/1910.02054, in its first table of memory."""
    plan = plan_of("z2all-1.1b", SHAPE_7_5B, "train.batch_tokens=1Mi", "--gpus", "64")
    assert plan["parameters"] == pytest.approx(7.5e9, rel=0.005)
    gb = [size / 1e9 for size in plan["zero_paper"]["stages"]]
    assert gb == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_12250_mb_cannot_be_the_states_of_fp32_adamw() -> None:
    """The reference run reports 12,250 MB for model and optimizer: fp32 weights and two moments are 15.07 GB."""
    plan = plan_of("z2all-1.1b", "--gpus", "1")
    assert plan["parameters"] == REFERENCE_PARAMETERS
    assert plan["zero_paper"]["optimizer"] / 1e9 == pytest.approx(15.07, abs=0.01)


def test_inference_of_70b() -> None:
    """140 GB of weights; the KV cache of 8 x 4,096 tokens is 10 GiB, and activations of one layer are 0.5 GiB."""
    found = plan_of("70b", "--gpus", "8")["inference"]
    assert found["weights"]["bf16"] / 1e9 == pytest.approx(140, rel=0.02)
    assert (found["batch"], found["length"]) == (8, 4096)
    assert (found["kv_cache"], found["intermediate"]) == (10 * 2**30, 2**29)


def test_blooms_formula_with_both_factors() -> None:
    with_checkpointing = bloom_tflops(52, 2048, 1024, seconds=127, gpus=64, recomputes=True)
    without = bloom_tflops(52, 2048, 1024, seconds=127, gpus=64, recomputes=False)
    assert with_checkpointing == pytest.approx(107.3, abs=0.05)
    assert without / with_checkpointing == pytest.approx(3 / 4)


def test_closed_form_of_a_gpt_layer() -> None:
    """24Bsh^2 + 4Bs^2h: a GPT layer has 12h^2 parameters, ours as many with a feed-forward width of 8/3 h."""
    hidden, seq_len, batch = 3072, 2048, 4
    config = ModelConfig(
        hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=1, num_attention_heads=24,
        num_key_value_heads=24, vocab_size=64,
    )  # fmt: skip
    flops = flops_per_token(config, seq_len)
    assert batch * seq_len * (flops.forward - flops.head) == (
        24 * batch * seq_len * hidden**2 + 4 * batch * seq_len**2 * hidden
    )


@pytest.mark.parametrize(
    ("tokens", "seconds", "gpus", "mfu"),
    [  # A800, 1.1B; one step has 65,536 tokens (16 x 1 x 2 x 2048), not 262,144: that would be 225%
        (65536, 9.85, 1, 18.41), (65536, 3.23, 1, 56.06), (65536, 8.69, 1, 20.87), (65536, 3.51, 1, 51.70),
        (65536, 3.78, 1, 47.94), (65536, 3.49, 1, 51.95), (65536, 3.37, 1, 53.71), (65536, 3.17, 1, 57.47),
        (1048576, 14.71, 4, 49.33), (1048576, 14.30, 4, 50.73), (1048576, 13.77, 4, 52.69),
    ],
)  # fmt: skip
def test_published_mfu_of_the_reference_model_is_by_6n_with_embeddings(
    tokens: int, seconds: float, gpus: int, mfu: float
) -> None:
    flops = palm_flops_per_token(REFERENCE, REFERENCE_PARAMETERS, 2048)
    assert 100 * tokens / seconds / gpus * flops / GPUS["A800"].flops == pytest.approx(mfu, abs=0.5)


def test_reference_model_on_an_a800() -> None:
    """3.23 s per step with all fused kernels, and 3.17 s with a fused optimizer too (MFU 57.47%)."""
    plan = plan_of(
        "z2all-1.1b", "--gpus", "1", "--gpu", "a800", "train.seq_len=2048", "train.batch_tokens=65536",
        "train.micro_batch_tokens=4096",
    )  # fmt: skip
    assert plan["step"]["expected"] == pytest.approx(3.23, rel=0.1)
    assert plan["step"]["expected"] == pytest.approx(3.17, rel=0.1)
    assert 100 * plan["speed"]["palm_mfu"] == pytest.approx(56.06, abs=4)
    assert 100 * plan["speed"]["palm_mfu"] == pytest.approx(57.47, abs=4)
    assert plan["speed"]["palm_mfu"] > plan["speed"]["mfu"]


def test_llama_2_7b_took_184320_gpu_hours() -> None:
    """On A100, 2T tokens in batches of 4M: https://arxiv.org/abs/2307.09288."""
    plan = plan_of(
        "7b", "--gpus", "1024", "--gpu", "a100", "--tokens", "2T", "train.seq_len=4096",
        "train.batch_tokens=4194304", "train.micro_batch_tokens=4096", "train.precision=bf16",
        "parallel.activation_checkpointing=selective", "--price", "2",
    )  # fmt: skip
    run = plan["run"]
    assert plan["parameters"] == 6_738_415_616
    assert run["gpu_hours"] == pytest.approx(184_320, rel=0.25)
    assert run["money"] == pytest.approx(2.0 * run["gpu_hours"] / run["goodput"])


def test_gpt_3_takes_34_days_on_1024_a100() -> None:
    """300B tokens in batches of 1,536 with full recomputation: https://arxiv.org/abs/2104.04473."""
    plan = plan_of(
        "z2all-1.1b", "--gpus", "1024", "--gpu", "a100", "--tokens", "300B",
        "model={hidden_size: 12288, intermediate_size: 32768, num_hidden_layers: 96, num_attention_heads: 96, "
        "num_key_value_heads: 96, vocab_size: 51200, max_position_embeddings: 2048, residual_fp32: false}",
        "parallel={tp: 8, pp: 16, schedule: interleaved, zero: 1, activation_checkpointing: full}",
        "train.seq_len=2048", f"train.batch_tokens={1536 * 2048}", "train.micro_batch_tokens=2048",
        "train.precision=bf16",
    )  # fmt: skip
    assert plan["parameters"] == pytest.approx(175e9, rel=0.01)
    assert plan["run"]["hours"] / 24 == pytest.approx(34, rel=0.05)


def test_tinyllama_has_24000_tokens_a_second_on_an_a100() -> None:
    """On 16 A100 of 40 GB: https://github.com/jzhang38/TinyLlama."""
    plan = plan_of(
        "z2all-1.1b", "--gpus", "16", "--gpu", "a100-40g", "train.seq_len=2048", "train.batch_tokens=2097152",
        "train.micro_batch_tokens=16384", "model.vocab_size=32000", "model.num_key_value_heads=4",
        "tokenizer.vocab_size=32000",
    )  # fmt: skip
    assert plan["parameters"] == pytest.approx(1.1e9, rel=0.01)
    assert plan["speed"]["tokens_per_second"] / 16 == pytest.approx(24_000, rel=0.25)


def test_torchtitans_8b_is_slower_on_128_h100_than_on_8() -> None:
    """6,667 and 6,514 tokens per second for each GPU: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, with
    torch.compile. Those H100 have 2.4 TB/s and 500 W. torchtitan's selective checkpointing recomputes every second
    product: between zero2all's selective, which keeps all, and full, which keeps none."""
    gpu, rates = replace(GPUS["H100"], memory_bandwidth=2400e9), {"selective": [], "full": []}
    for mode, gpus in itertools.product(rates, (8, 128)):
        _, _, _, speed = planned(
            gpu, gpus, "train.seq_len=8192", f"train.batch_tokens={16384 * gpus}", "train.micro_batch_tokens=16384",
            f"parallel.activation_checkpointing={mode}",
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        )  # fmt: skip
        rates[mode].append(speed.tokens_per_second / gpus)
    for keeps_all, keeps_none, published in zip(rates["selective"], rates["full"], (6667, 6514), strict=True):
        assert keeps_none < published < keeps_all
        assert (keeps_all + keeps_none) / 2 == pytest.approx(published, rel=0.1)
    assert all(0.95 < one[1] / one[0] < 1 for one in rates.values())


def test_megatrons_models_are_ranked() -> None:
    """MFU 41.5, 51.4, 56.0 and 56.3% on A100: https://arxiv.org/abs/2205.05198, tables 3 and 5; 175B and 530B with
    three interleaved stages, 1T without.

    Without its bubble (0, 3.6, 4.0 and 12.3% of the busy time) a busy GPU there reaches 41.5, 53.3, 58.3 and 63.2%:
    products of wider matrices become faster. A plan has one efficiency for all products, so that of 1T, whose bubble is
    three times as long, comes out below 530B. Both are a fifth too slow, of which 0.3 points are a hundredth."""
    mfu, bubbles = {}, []
    for name, hidden, layers, heads, pp, samples, micro, stages in (
        ("22B", 6144, 48, 64, 1, 4, 4, 1),
        ("175B", 12288, 96, 96, 8, 64, 1, 3),
        ("530B", 20480, 105, 128, 35, 280, 1, 3),
        ("1T", 25600, 128, 160, 64, 512, 1, 1),
    ):
        _, _, step, speed = planned(
            "A100", 8 * pp, "train.seq_len=2048", f"train.batch_tokens={2048 * samples}",
            f"train.micro_batch_tokens={2048 * micro}", "parallel.tp=8", f"parallel.pp={pp}",
            "parallel.activation_checkpointing=selective", "model.residual_fp32=false", stages_per_rank=stages,
            vocab_size=51200, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 8 * 8, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads,
        )  # fmt: skip
        mfu[name] = speed.mfu
        bubbles.append(step.bubble)
    assert mfu["22B"] < mfu["175B"] < mfu["530B"]
    assert mfu["1T"] > mfu["22B"]
    busy = [share * (1 + bubble) for share, bubble in zip(mfu.values(), bubbles, strict=True)]
    assert busy == sorted(busy)  # as the published ones
    published = (0.415, 0.514, 0.560, 0.563)
    assert all(0.7 < share / known < 1.05 for share, known in zip(mfu.values(), published, strict=True))


def test_probability_of_a_failure() -> None:
    assert failure_probability(0.01, 128) == pytest.approx(0.7237, abs=1e-4)
    assert failure_probability(FAILURE_RATES["0.27% a card and day"], 1000) == pytest.approx(0.93, abs=0.005)
