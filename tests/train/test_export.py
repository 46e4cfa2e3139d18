from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_recipe
from zero2all.errors import UsageError, Z2aError
from zero2all.generation import SamplingParams, generate_batch
from zero2all.train import Run, export_run, train
from zero2all.train.export import TOLERANCE


@pytest.fixture(scope="module")
def run(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('export')}", "train.steps=4")
    train(recipe)
    return Run.open(recipe.run_dir)


def test_exported_run_loads_in_transformers_without_our_code(run: Run, tmp_path: Path) -> None:
    result = export_run(run, tmp_path / "hf", check=True)
    assert result["max_logit_difference"] <= TOLERANCE
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_generation_stops_at_the_end_of_a_document_or_message(run: Run, tmp_path: Path) -> None:
    export_run(run, tmp_path / "hf")
    special = run.tokenizer().special_ids
    eos_token_ids = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert eos_token_ids == [special["<|endoftext|>"], special["<|im_end|>"]]


def test_every_file_of_an_export_has_the_same_permissions(run: Run, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_run(run, tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in (tmp_path / "hf").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == "-rw-r-----"


def test_transformers_generates_the_same_text(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export_run(run, tmp_path / "hf")
    model, tokenizer = run.load_model(), run.tokenizer()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    prompt = [tokenizer.eos_token_id, *tokenizer.encode("the model")]
    ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    stops = [position for position, id in enumerate(ids) if id in tokenizer.stop_token_ids]
    text = tokenizer.decode(ids[: stops[0]] if stops else ids)
    [completion] = generate_batch(model, tokenizer, ["the model"], SamplingParams(max_tokens=12, temperature=0))
    assert completion.text == text


def test_a_wrong_export_does_not_pass_the_check(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zero2all.model.hf as hf

    original = hf.hf_weights

    def wrong(model: object) -> dict[str, torch.Tensor]:
        weights = original(model)  # type: ignore[arg-type]
        name = "model.layers.0.self_attn.q_proj.weight"
        return {**weights, name: weights[name].flip(0)}

    monkeypatch.setattr(hf, "hf_weights", wrong)
    with pytest.raises(Z2aError, match="nothing was written"):
        export_run(run, tmp_path / "hf", check=True)
    assert not list(tmp_path.iterdir())


def test_bf16_export_halves_the_file(run: Run, tmp_path: Path) -> None:
    export_run(run, tmp_path / "a")
    export_run(run, tmp_path / "b", bf16=True)
    full, half = ((tmp_path / name / "model.safetensors").stat().st_size for name in "ab")
    assert half < 0.6 * full


def test_only_an_export_is_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="something else"):
        export_run(run, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    export_run(run, tmp_path / "hf")
    export_run(run, tmp_path / "hf")  # an export may replace an export


def test_a_step_without_a_checkpoint_is_reported(run: Run, tmp_path: Path) -> None:
    with pytest.raises(Z2aError, match="steps there: 4"):
        export_run(run, tmp_path / "hf", step=3)
