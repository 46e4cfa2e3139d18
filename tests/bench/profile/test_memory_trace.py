"""Formulas of memory beside a trace of the model, and beside real steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks import plan_memory
from typer.testing import CliRunner

from zero2all.bench.profile import memory_trace as trace_module
from zero2all.bench.profile.memory_trace import trace_memory
from zero2all.cli.main import app
from zero2all.planner.workload import largest_stage
from zero2all.recipe import load_recipe_or_preset

SIZES = ["train.batch_tokens=32Ki", "train.micro_batch_tokens=2Ki", "train.seq_len=512", "model.num_hidden_layers=6"]
MOE = "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 256, first_k_dense_replace: 1}"
CHECKPOINTING = "parallel.activation_checkpointing="


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, ["train.precision=fp32"]),
        (4, ["train.precision=bf16", CHECKPOINTING + "full", MOE]),
        (8, ["train.precision=bf16", CHECKPOINTING + "selective", "parallel.tp=2", "parallel.pp=2"]),
    ],
    ids=["one rank", "fsdp, experts, full", "tp, pp, selective"],
)
def test_the_formula_is_within_5_percent_of_the_trace(world: int, overrides: list[str]) -> None:
    recipe = load_recipe_or_preset("z2all-300m", [*SIZES, *overrides])
    traces = trace_memory(recipe, largest_stage(recipe), world)
    names = {part.name for part in traces[-1].parts}
    assert {"weights (stored)", "gradients", "optimizer state", "activations", "logits and loss"} <= names
    for trace in traces:
        for part in trace.parts:
            assert part.formula == pytest.approx(part.traced, rel=0.05), f"{part.name} of rank {trace.pp_rank}"


def test_a_layer_that_keeps_more_than_the_formula_says_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = trace_module.TraceTracker._enter
    held: list[Any] = []

    def leaking(self: Any, name: str) -> None:
        original(self, name)
        if name.startswith("layers."):
            held.append(trace_module.torch.zeros(2048, 4096).add(1))

    monkeypatch.setattr(trace_module.TraceTracker, "_enter", leaking)
    recipe = load_recipe_or_preset("z2all-300m", [*SIZES, "train.precision=fp32"])
    [trace] = trace_memory(recipe, largest_stage(recipe), 1)
    assert trace.worst.name == "activations"
    assert trace.worst.difference < -0.1


def test_70b_on_1024_ranks_in_the_terminal() -> None:
    layout = "parallel={tp: 8, pp: 4, schedule: interleaved, activation_checkpointing: selective}"
    command = ["plan", "70b-1024", layout, "--gpus", "1024", "--trace", "--json"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    traces = json.loads(found.stdout)["traces"]
    assert [trace["pp_rank"] for trace in traces] == [0, 2, 3]
    for trace in traces:
        assert all(abs(part["difference"]) < 0.05 for part in trace["parts"]), trace


def test_the_predicted_peak_is_within_10_percent_of_a_step() -> None:
    for one in plan_memory.compare(["small", "medium, full recomputation"]):
        assert abs(one.difference) < 0.1, plan_memory.table([one])
        assert one.predicted.bytes_of("optimizer state") == pytest.approx(one.measured.optimizer, rel=0.01)
