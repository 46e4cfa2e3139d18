"""train.compile: what auto chooses, and what happens if a block cannot be compiled."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.parallel.helpers import small_config
from tests.ranks import on_ranks
from zero2all.base.machine.devices import wants_compile
from zero2all.checkpoint import RankGroup
from zero2all.model import ModelInputs
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.recipe import ParallelRecipe, parse_recipe
from zero2all.train import compile_probe
from zero2all.train.compile_probe import choose_compile, compile_failure

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
CONFIG = small_config(vocab_size=320, moe=MOE)


def choose(*overrides: str, device: torch.device = CUDA, ranks: RankGroup | None = None) -> bool:
    recipe = parse_recipe("{train: {steps: 1}}", list(overrides))
    return choose_compile(recipe, CONFIG, device, torch.float32, ranks or RankGroup())


def failing_backend(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no C compiler\n\nset CC\nmore")


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend=backend))


def test_auto_compiles_on_cuda_if_a_block_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_probe, "compile_failure", lambda *args: None)
    assert choose()
    assert not choose("train.compile=false")
    assert not choose(device=CPU)
    assert choose("train.compile=true", device=CPU)
    assert choose("parallel.activation_checkpointing=budget", device=CPU), "only the compiler keeps it"
    assert not choose("parallel={pp: 2, schedule: zbv}")
    assert [wants_compile(wanted, CPU) for wanted in (True, False, "auto")] == [True, False, False]


def test_auto_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compile_probe, "compile_failure", lambda *args: "NoCompiler: no gcc")
    assert not choose()
    said = capsys.readouterr().err
    assert "on rank 0 torch.compile failed on one (NoCompiler: no gcc); set train.compile=false" in said
    assert choose("train.compile=true"), "taken at its word"


def test_the_probe_runs_forward_and_backward_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run_backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: (ran.append("backward"), run_backward(self))[1])
    compile_with(monkeypatch, "aot_eager")
    selective = ParallelRecipe(activation_checkpointing="selective")
    assert compile_failure(CONFIG, selective, CPU, torch.bfloat16) is None
    assert ran == ["backward"]


def test_a_probe_that_fails_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, failing_backend)
    failure = compile_failure(CONFIG, ParallelRecipe(), CPU, torch.float32)
    assert failure is not None
    assert "no C compiler" in failure
    assert "more" not in failure


def choose_where_rank_1_fails() -> bool:
    ranks = RankGroup()
    reason = "RuntimeError: no gcc" if ranks.rank == 1 else None
    compile_probe.compile_failure = lambda *args: reason  # type: ignore[assignment]
    return choose(ranks=ranks)


def test_all_ranks_choose_the_same() -> None:
    assert on_ranks(2, choose_where_rank_1_fails) == [False, False]


def test_generation_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every length of the KV cache would be a compilation."""
    from zero2all.generation.rank_model import as_rank_model
    from zero2all.model import KVCache

    compiled: list[Any] = []
    compile_with(monkeypatch, lambda graph, inputs: (compiled.append(graph), graph.forward)[1])
    mesh = ParallelMesh(ParallelDims(), CPU)
    model = ParallelModel(CONFIG, ParallelRecipe(), mesh, seed=0, compile=True)
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        for generator in (as_rank_model(model), cast(Any, SimpleNamespace(generate_logits=model.generate_logits))):
            assert generator.generate_logits(tokens, KVCache(1, 8, CPU), None) is not None
    assert compiled == []
    model.forward_backward(ModelInputs(tokens, tokens), divisor=6)
    assert compiled
    torch.compiler.reset()
