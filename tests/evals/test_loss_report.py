"""``z2a eval loss``: the same metrics as transformers computes, on any text, with their noise."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import tiny_recipe
from tests.ranks import on_ranks
from tests.train.commands import refused, z2a
from zero2all.base.records import parse_record
from zero2all.cli.main import app
from zero2all.evals import evaluate_bpb
from zero2all.evals.loss_report import LossOptions, report_loss, spread_about_trend
from zero2all.evals.target import find_target
from zero2all.evals.validation_loss import ratio_error
from zero2all.model import Z2all, export_hf
from zero2all.recipe import ModelConfig, ParallelRecipe, TokenizerRecipe
from zero2all.tokenizer import Tokenizer, train_tokenizer
from zero2all.tokens import TokenStore
from zero2all.track.eval_record import LossEvaluation
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView
from zero2all.train import Run

TOLERANCE = 1e-4  # to transformers, in bits per byte
SEQ_LEN = 32


def evaluate(target: Path, *words: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["eval", "loss", *map(str, (target, *words)), "--json"])
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def token_nats(model: Any, inputs: list[int], targets: list[int]) -> list[float]:
    """By transformers, a row alone."""
    with torch.inference_mode():
        logits = model(torch.tensor([inputs])).logits[0].double()
    return (-logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]).tolist()


@pytest.fixture(scope="module")
def theirs(hf: Path) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(hf)


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 16), (16, 1), (64, 32)])
def test_windowed_bits_per_byte_are_those_of_transformers(
    window: int, stride: int, hf: Path, theirs: tuple[Any, Any], documents: list[str], test_set: Path
) -> None:
    """Each token from the window that an independent formula gives it."""
    model, tokenizer = theirs
    nats, tokens = 0.0, 0
    for text in documents:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        row = [tokenizer.eos_token_id, *ids]
        for place in range(len(ids)):
            moves = math.ceil(max(0, place + 1 - window) / stride)
            end = min(window + moves * stride, len(ids))
            first = max(0, end - window)
            nats += token_nats(model, row[first:end], row[first + 1 : end + 1])[place - first]
        tokens += len(ids)
    result = evaluate(hf, "--test-set", f"words={test_set}", "--window", window, "--stride", stride)
    size = sum(len(text.encode()) for text in documents)
    assert result["test_sets"]["words"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, abs=TOLERANCE)
    assert result["test_sets"]["words"]["loss"] == pytest.approx(nats / tokens, abs=TOLERANCE)
    assert result["test_sets"]["words"]["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=TOLERANCE)
    assert (result["bytes"], result["tokens"], result["num_documents"]) == (size, tokens, len(documents))
    assert result["sources"] == {}


def test_packed_bits_per_byte_with_document_masks_are_those_of_transformers(
    evaluated: Run, theirs: tuple[Any, Any], documents: list[str]
) -> None:
    """Each sequence divided at end-of-text tokens, each part alone in a row, so with positions of its own."""
    model, tokenizer = theirs
    stream = [tokenizer.eos_token_id]
    for text in documents:
        stream += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    nats = 0.0
    for start in range(0, len(stream) - 1, SEQ_LEN):
        inputs, targets = stream[start : start + SEQ_LEN], stream[start + 1 : start + SEQ_LEN + 1]
        inputs = inputs[: len(targets)]
        begins = [0, *(place for place, id in enumerate(inputs) if id == tokenizer.eos_token_id and place)]
        for first, last in zip(begins, [*begins[1:], len(inputs)], strict=True):
            losses = token_nats(model, inputs[first:last], targets[first:last])
            wanted = targets[first:last]
            nats += sum(loss for loss, id in zip(losses, wanted, strict=True) if id != tokenizer.eos_token_id)
    size = sum(len(text.encode()) for text in documents)
    result = evaluate(evaluated.directory)
    assert result["test_sets"]["words"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, abs=TOLERANCE)
    assert result["test_sets"]["words"]["bytes"] == size


def test_the_export_of_a_run_has_the_metrics_of_the_run(evaluated: Run, hf: Path) -> None:
    ours, exported = evaluate(evaluated.directory), evaluate(hf, "--recipe", evaluated.directory)
    recorded = RunView(LocalRunLocation(evaluated.directory))
    recorded.read_to_end()
    table = recorded.validation_table()
    assert set(ours["sources"]) == {"en", "zh", "code"}
    for result in (ours, exported):
        assert result["bits_per_byte"] == pytest.approx(table.mean["validation/all"][-1], abs=1e-5)
        assert result["unigram_bits_per_byte"] == ours["unigram_bits_per_byte"]
    assert ours["test_sets"]["words"]["bits_per_byte"] == pytest.approx(
        table.mean["validation/words (test set)"][-1], abs=1e-5
    )
    assert (ours["step"], exported["step"]) == (6, None)
    earlier = evaluate(evaluated.checkpoints.path(3))
    assert earlier["bits_per_byte"] == pytest.approx(table.mean["validation/all"][2], abs=1e-5)


def test_the_validation_set_is_encoded_for_a_model_with_another_tokenizer(
    workspace: Path, evaluated: Run, tmp_path: Path
) -> None:
    recipe = TokenizerRecipe(vocab_size=320, min_frequency=1)
    train_tokenizer(recipe, workspace / "documents", tmp_path / "tokenizer")
    shape = {**evaluated.recipe.model.model_dump(exclude={"preset"}), "vocab_size": 320}
    export_hf(Z2all(ModelConfig.model_validate(shape)).init_weights(0), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "tokenizer" / name, tmp_path / name)
    result = evaluate(tmp_path, "--recipe", evaluated.directory)
    tokenizer, budget = Tokenizer(workspace / "tokenizer"), 4096 // 3
    for name, [shard] in TokenStore(workspace / "tokens", "valid").sources.items():
        count = int(np.searchsorted(shard.document_offsets[:-1], budget))
        tokens = shard.read(0, int(shard.document_offsets[count]))
        size = len(tokenizer.decode_bytes([id for id in tokens.tolist() if id != tokenizer.eos_token_id]))
        assert result["sources"][name]["bytes"] == size
    assert result["unigram_bits_per_byte"] is None


def test_the_table_has_the_noise_of_every_metric(evaluated: Run, hf: Path, test_set: Path) -> None:
    result, text = evaluate(evaluated.directory), z2a("eval", "loss", evaluated.directory)
    assert list(result["noise"]) == ["all", "en", "zh", "code", "words (test set)"]
    assert {floor["evaluations"] for floor in result["noise"].values()} == {6}
    floor, rows = result["noise"]["all"]["bits_per_byte"], text.splitlines()
    assert floor > 0
    assert f"differences below {floor:.4f} bits per byte are noise: so much the last 6 evaluations" in rows[-1]
    assert "packed sequences of 32 tokens, attention inside documents" in rows[0]
    values = next(row for row in rows if row.startswith("words (test set)")).split()
    words = result["test_sets"]["words"]
    shown = (f"{words['bits_per_byte']:.4f}", f"{1.96 * words['bits_per_byte_error']:.4f}")
    assert tuple(values[3:5]) == shown
    alone = evaluate(hf, "--test-set", f"words={test_set}")
    expected = 1.96 * math.sqrt(2) * alone["bits_per_byte_error"]
    assert alone["noise"]["all"] == {"bits_per_byte": pytest.approx(expected, abs=1e-5), "evaluations": None}
    assert "each document alone, in windows of 64 tokens with a stride of 32" in alone["scoring"]


def test_the_standard_error_is_that_of_a_bootstrap() -> None:
    rng = np.random.default_rng(0)
    strata = [
        (rng.gamma(2.0, 5.0, 300), rng.gamma(3.0, 4.0, 300)),
        (rng.gamma(1.0, 9.0, 200), rng.gamma(5.0, 2.0, 200)),
    ]
    ratios = []
    for _ in range(2000):
        drawn = [rng.integers(0, len(above), len(above)) for above, _ in strata]
        sums = [
            (above[chosen].sum(), below[chosen].sum()) for (above, below), chosen in zip(strata, drawn, strict=True)
        ]
        ratios.append(sum(above for above, _ in sums) / sum(below for _, below in sums))
    assert ratio_error(strata) == pytest.approx(np.std(ratios), rel=0.1)
    assert ratio_error([*strata, (np.array([1.0]), np.array([1.0]))]) is None


def test_the_spread_of_a_curve_leaves_out_its_trend() -> None:
    steps, noise = np.array([100.0, 200, 300, 400]), np.array([0.01, -0.01, -0.01, 0.01])
    expected = math.sqrt(4 * 0.01**2 / 2)
    assert spread_about_trend(steps, 2.0 - 0.003 * steps + noise) == pytest.approx(expected)


def test_records_of_earlier_versions_are_read() -> None:
    part = {"bits_per_byte": 0.5, "unigram_bits_per_byte": 2.0, "below_unigram": 0.75, "bytes": 100}
    read = parse_record(LossEvaluation, {"step": 3, **part, "sources": {"en": part}}, "record.jsonl")
    assert (read.bits_per_byte, read.sources["en"].bytes, read.loss, read.test_sets) == (0.5, 100, None, {})


def test_wrong_usage_is_refused_with_the_reason(evaluated: Run, hf: Path, tmp_path: Path) -> None:
    run = evaluated.directory
    assert refused("eval", "loss", hf) == "there is nothing to evaluate on: give test sets or a validation set"
    assert "--stride is for a sliding window" in refused("eval", "loss", run, "--stride", 4)
    assert "more than the context of the model (64)" in refused("eval", "loss", run, "--window", 65)
    assert "write NAME=PATH" in refused("eval", "loss", run, "--test-set", "words")
    assert "test set 'words': nothing at" in refused("eval", "loss", run, "--test-set", f"words={tmp_path}/none")
    assert "must not contain '/'" in refused("eval", "loss", run, "--test-set", f"a/b={tmp_path}")
    assert "is not the directory of a run" in refused("eval", "loss", tmp_path)


def test_a_run_without_its_tokens_is_evaluated_on_test_sets(evaluated: Run, test_set: Path, tmp_path: Path) -> None:
    shutil.copytree(evaluated.directory, tmp_path / "run")
    recipe = (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8")
    tokens = str(evaluated.recipe.tokens_dir)
    assert tokens in recipe
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.replace(tokens, str(tmp_path / "none")), encoding="utf-8")
    assert "no tokens in" in refused("eval", "loss", tmp_path / "run")
    result = evaluate(tmp_path / "run", "--test-set", f"more={test_set}")
    assert (result["sources"], list(result["test_sets"])) == ({}, ["words", "more"])


def evaluate_on_ranks(targets: dict[str, LossOptions], parallel: ParallelRecipe) -> list[dict[str, Any]]:
    found = {name: find_target(name) for name in targets}
    return [
        report_loss(found[name], found[name].load_parallel_model(parallel), options).to_json()
        for name, options in targets.items()
    ]


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    return [value] if isinstance(value, float | int) else []


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "tolerance"),
    [({}, 0), ({"dp_replicate": 4, "dp_shard": 1}, 0), ({"tp": 2, "pp": 2, "sp": False}, 1e-5)],
    ids=["fsdp", "ddp", "tp-pp"],
)
def test_four_ranks_share_the_work_and_get_the_same_metrics(
    parallel: dict[str, Any], tolerance: float, evaluated: Run, hf: Path, test_set: Path
) -> None:
    """Batches do not depend on the number of ranks, so data-parallel ranks get identical metrics."""
    sets = {"words": str(test_set)}
    targets = {str(evaluated.directory): LossOptions(test_sets=sets), str(hf): LossOptions(test_sets=sets, window=16)}
    alone = []
    for name, options in targets.items():
        found = find_target(name)
        alone.append(report_loss(found, found.load_model(), options).to_json())
    is_ddp = "dp_replicate" in parallel
    layout = ParallelRecipe.model_validate(parallel)
    for results in on_ranks(4, evaluate_on_ranks, targets, layout, detail=not is_ddp):
        for result, expected in zip(results, alone, strict=True):
            assert result.keys() == expected.keys()
            assert numbers(result) == pytest.approx(numbers(expected), abs=tolerance, rel=tolerance)


def test_the_window_and_the_mask_change_the_metric(evaluated: Run, workspace: Path) -> None:
    """What the comparisons above would not see if an option were ignored."""
    packed, windowed = evaluate(evaluated.directory), evaluate(evaluated.directory, "--window", 16)
    assert abs(packed["bits_per_byte"] - windowed["bits_per_byte"]) > 10 * TOLERANCE
    unmasked = evaluated.recipe.model_copy(
        update={"train": evaluated.recipe.train.model_copy(update={"document_mask": False})}
    )
    other = evaluate_bpb(evaluated.load_model(), evaluated.tokenizer(), unmasked)
    assert abs(packed["bits_per_byte"] - other.bits_per_byte) > 10 * TOLERANCE
    assert tiny_recipe(workspace).train.seq_len == SEQ_LEN
