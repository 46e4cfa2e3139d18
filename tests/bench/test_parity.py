"""Layouts against one process. ``z2a bench parity`` runs all of them for longer, also those of four ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from zero2all.base.errors import UsageError
from zero2all.base.plugins import builtin_names
from zero2all.bench import parity
from zero2all.bench.parity import SEPARATE_COLUMNS
from zero2all.bench.parity_cases import (
    TRAINING_SETUPS,
    ParityCase,
    TrainingSetup,
    cases,
    select_cases,
    select_setups,
)
from zero2all.cli.main import app
from zero2all.model import ModelInputs
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe

ON_TWO = (
    "FSDP 2, accumulated",
    "TP 2 + SP",
    "TP 2",
    "PP 2 1f1b",
    "PP 2 zbv",
    "CP 2 gather",
    "CP 2 ulysses",
    "CP 2 ring",
    "EP 2",
)


def training_setup(name: str) -> TrainingSetup:
    return next(setup for setup in TRAINING_SETUPS if setup.name == name)


HARD, MUON = training_setup("SGD, document mask, full checkpointing"), training_setup("Muon")
MUON_FP32 = training_setup("Muon in fp32")


def chosen(*names: str) -> list[ParityCase]:
    found = [case for case in cases() if case.name in names]
    assert {case.name for case in found} == set(names)
    return found


def check(names: tuple[str, ...], *setups: TrainingSetup, detail: bool = True) -> None:
    found = list(parity.measure_parity(chosen(*names), 3, setups, seconds=240, detail=detail))
    wrong = [result for result in found if not result.equal]
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_equal_one_process() -> None:
    check(ON_TWO, HARD, MUON, MUON_FP32)


@pytest.mark.slow
def test_copies_equal_one_process() -> None:
    check(("DDP 2, accumulated",), training_setup("SGD"), MUON_FP32, detail=False)


@pytest.mark.slow
def test_experts_of_the_multi_token_prediction_block_are_sharded() -> None:
    check(("EP 2",), training_setup("MTP"), detail=False)


@pytest.mark.slow
def test_zero_bubble_reduces_what_lora_trains() -> None:
    """Weights that are frozen have no gradient for the second half of the backward pass."""
    check(("HSDP 2x1 x PP 2 zbv",), training_setup("LoRA"), detail=False)


@pytest.mark.slow
def test_the_command_compares_the_layouts_that_it_is_given(tmp_path: Path) -> None:
    """Three layouts, through ``z2a bench parity``: what runs for the table of the docs."""
    names, setups = {"TP 2", "PP 2 1f1b", "CP 2 ulysses, experts"}, ["LoRA", "balance loss", "dropout", "windows"]
    words = [word for name in sorted(names) for word in ("--only", name)]
    words += [word for name in setups for word in ("--setup", name)]
    done = CliRunner().invoke(app, ["bench", "parity", "--steps", "1", "--out", str(tmp_path), "--json", *words])
    assert done.exit_code == 0, done.output
    outcomes = json.loads((tmp_path / "bench-parity.json").read_text())["outcomes"]
    found = [(outcome["layout"], outcome["kind"]) for outcome in outcomes]
    assert sorted(found) == [
        ("CP 2 ulysses, experts", "balance loss"),
        ("CP 2 ulysses, experts", "dropout"),
        ("CP 2 ulysses, experts", "windows"),
        ("PP 2 1f1b", "LoRA"),
        ("PP 2 1f1b", "dropout"),
        ("PP 2 1f1b", "windows"),
        ("TP 2", "dropout"),
        ("TP 2", "windows"),
    ]
    assert all(outcome["equal"] for outcome in outcomes)
    assert [outcome["layout"] for outcome in outcomes if outcome["differs_by_design"]] == ["CP 2 ulysses, experts"]
    [row] = [line for line in (tmp_path / "bench-parity.md").read_text().splitlines() if "experts" in line]
    assert row.endswith("| yes, but not dropout |")


def test_layouts_are_selected_by_name_or_pattern() -> None:
    def names(*patterns: str) -> list[str]:
        return [case.name for case in select_cases(patterns)]

    assert names("TP 2") == ["TP 2"]  # and not "TP 2 + SP"
    assert names("TP ?", "CP 2 r*g") == ["TP 2", "TP 4", "CP 2 ring"]
    assert names("*ring*") == ["CP 2 ring", "CP 4 ring", "CP 2 ring, experts", "CP 2 ring x TP 2"]
    assert names() == [case.name for case in cases()]
    with pytest.raises(UsageError, match="no layout matches 'tp 2'"):
        names("CP 2 ring", "tp 2")
    assert [setup.name for setup in select_setups(["Muon*", "LoRA"])] == ["Muon", "Muon in fp32", "LoRA"]
    with pytest.raises(UsageError, match="no setup matches 'lora'"):
        select_setups(["lora"])


def test_every_setup_is_in_the_table_and_compared_in_some_layout() -> None:
    plain = [setup for setup in TRAINING_SETUPS if setup.model_variant == "plain" and not setup.name.startswith("Muon")]
    assert {setup.name for setup in TRAINING_SETUPS} == {*SEPARATE_COLUMNS, *(setup.name for setup in plain)}
    for setup in TRAINING_SETUPS:
        assert sum(setup.supports(case) for case in cases()) >= 5, setup.name
    balanced = [case for case in cases() if training_setup("balance loss").supports(case)]
    assert {case.parallel.cp for case in balanced} == {1, 2}


def test_every_choice_of_a_recipe_is_in_the_table() -> None:
    """A new schedule, a new kind of attention and so on without a line here would be one that nobody has compared."""
    table = cases()
    assert len({case.name for case in table}) == len(table)
    assert len({setup.name for setup in TRAINING_SETUPS}) == len(TRAINING_SETUPS)
    for size in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"):
        assert {getattr(ParallelDims.from_recipe(case.parallel, case.ranks), size) for case in table} >= {1, 2}, size
    for field, more in {
        "schedule": (),
        "cp_attention": (),
        "reduces_every_micro_batch": (True, False),
        "zero": (),
        "sp": (True, False),
        "reshard_after_forward": ("auto", "always", "never", 2),
    }.items():
        wanted = more or get_args(ParallelRecipe.model_fields[field].annotation)
        assert len(wanted) > 1
        assert {getattr(case.parallel, field) for case in table if case.ranks > 1} >= set(wanted), field
    # budget is the compiler's; Lion and 8-bit AdamW work on each element alone, as AdamW does. Weights in
    # bf16 have bounds of their own: see tests/optim/test_optimizers_on_ranks.py.
    assert {kind.checkpointing for kind in TRAINING_SETUPS} == {"none", "full", "selective"}
    elementwise = {"lion", "adamw-8bit", "adamw-bf16", "adamw-bf16-kahan"}
    assert {kind.optimizer for kind in TRAINING_SETUPS} == {*builtin_names("optimizer")} - elementwise
    sharded = [case for case in table if case.micro_batch_size is not None and case.ranks > 1]
    assert {case.parallel.reduces_every_micro_batch for case in sharded} == {True, False}
    assert {case.parallel.zero for case in sharded} == {1, 2, 3}
    assert any(case.moe for case in table if case.parallel.ep == 1)


@pytest.mark.parametrize("wrong", ["scale", "mask", "norm"])
def test_what_is_wrong_with_a_layout_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself, in one process: a gradient 0.01% off, a mask that is lost, clipping at another norm."""
    case, setup = chosen("one process, accumulated")[0], training_setup("SGD, document mask, full checkpointing")
    trial = parity.Trial(case, setup, steps=2)
    references = {parity._reference_key(trial): parity._run(parity._single_process_trial(trial))}
    assert all(compared.result.equal for compared in parity._compare([trial], references))
    backward, clip = ParallelModel.forward_backward, ParallelModel.clip_grad_norm_

    def broken(self: ParallelModel, inputs: ModelInputs, divisor: float, **options: Any) -> Tensor:
        divisor = divisor * 1.0001 if wrong == "scale" else divisor
        inputs = replace(inputs, doc_starts_BS=None) if wrong == "mask" else inputs
        return backward(self, inputs, divisor, **options)

    def longer(self: ParallelModel, max_norm: float) -> Any:
        return clip(self, max_norm * 0.5 if wrong == "norm" else max_norm)

    monkeypatch.setattr(ParallelModel, "forward_backward", broken)
    monkeypatch.setattr(ParallelModel, "clip_grad_norm_", longer)
    results = [compared.result for compared in parity._compare([trial], references)]
    assert not any(result.equal for result in results)
    assert "| NO |" in parity.parity_markdown(results)


def test_one_process_is_the_model_itself() -> None:
    """The trivial layout adds nothing: same gradients and the same norm as a bare loop, bit for bit."""
    from zero2all.model import Z2all

    config = ModelConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        vocab_size=64,
    )
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
    parallel_model = ParallelModel(config, ParallelRecipe(), ParallelMesh(ParallelDims(), torch.device("cpu")), seed=5)
    losses = parallel_model.forward_backward(ModelInputs(tokens[:, :-1], tokens[:, 1:]), divisor=64, micro_batch_size=2)
    bare = Z2all(config).init_weights(5)
    for micro_batch in tokens.split(2):
        (bare(micro_batch[:, :-1], targets_BS=micro_batch[:, 1:]).sum() * (1 / 64)).backward()
    ours = dict(parallel_model.model.named_parameters())
    for name, parameter in bare.named_parameters():
        assert torch.equal(ours[name].grad, parameter.grad), name
    norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
    assert parallel_model.clip_grad_norm_(0.1).item() == pytest.approx(norm.item(), rel=1e-6)
    for name, parameter in bare.named_parameters():
        assert torch.allclose(ours[name].grad, parameter.grad, rtol=1e-5, atol=1e-9), name
    assert parallel_model.all_reduce_sum(losses.sum()).item() == losses.sum().item()
    assert losses.shape == (4, 16)


@pytest.mark.parametrize("values", [[1e-9, math.nan, 1e-9], [math.nan, 0.0], [0.0, math.inf]])
def test_what_is_not_finite_is_never_equal(values: list[float]) -> None:
    assert parity.max_difference(values) == math.inf


def test_a_gradient_that_no_rank_has_is_never_equal() -> None:
    trial = parity.Trial(chosen("one process, accumulated")[0], HARD, 1)
    reference = parity._run(parity._single_process_trial(trial))
    references = {parity._reference_key(trial): reference}
    [compared] = parity._compare([trial], references)
    assert parity._merge_ranks([compared], references).equal
    lost = replace(compared, parameters=compared.parameters[1:])
    assert not parity._merge_ranks([lost], references).equal
