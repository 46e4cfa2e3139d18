from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.runs import train_run
from zero2all.base.errors import UsageError, Z2aError
from zero2all.export import export_run
from zero2all.export.model_card import _without_private
from zero2all.export.run_export import TOLERANCES, ExportDtype
from zero2all.generation import SamplingParams, generate_batch
from zero2all.model.hf_weights import HFTensor
from zero2all.model.weights import WeightReader
from zero2all.track.eval_record import EvalLine, append_evals
from zero2all.train import Run


@pytest.fixture(scope="module")
def run(tiny_run: Run) -> Run:
    return tiny_run


@pytest.fixture(scope="module")
def exported(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests read it."""
    out = tmp_path_factory.mktemp("exported") / "hf"
    export_run(run, out)
    return out


def test_exported_run_loads_in_transformers_without_our_code(run: Run, tmp_path: Path) -> None:
    result = export_run(run, tmp_path / "hf", check=True)
    assert result.max_difference is not None
    assert result.max_difference <= TOLERANCES["hf"]
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "loss.svg",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_code_of_the_card_runs_in_its_directory(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(exported)
    [code] = re.findall(r"^```python\n(.*?)^```", Path("README.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(code, {})
    assert "Once upon a time" in capsys.readouterr().out


def test_generation_stops_at_the_end_of_a_document_or_message(run: Run, exported: Path) -> None:
    special = run.tokenizer().special_ids
    eos_token_ids = json.loads((exported / "generation_config.json").read_text())["eos_token_id"]
    assert eos_token_ids == [special["<|endoftext|>"], special["<|im_end|>"]]


def test_every_file_of_an_export_has_the_same_permissions(run: Run, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_run(run, tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in (tmp_path / "hf").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == "-rw-r-----"


def test_transformers_generates_the_same_text(run: Run, exported: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokenizer = run.load_model(), run.tokenizer()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    prompt = [tokenizer.eos_token_id, *tokenizer.encode("the model")]
    ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    stops = [position for position, id in enumerate(ids) if id in tokenizer.stop_token_ids]
    text = tokenizer.decode(ids[: stops[0]] if stops else ids)
    [completion] = generate_batch(model, tokenizer, ["the model"], SamplingParams(max_tokens=12, temperature=0))
    assert completion.text == text


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """One tensor is exported wrong."""
    original = HFTensor.read

    def wrong(tensor: HFTensor, weights: WeightReader) -> torch.Tensor:
        values = original(tensor, weights)
        return change(values) if tensor.name == name else values

    monkeypatch.setattr(HFTensor, "read", wrong)


def test_a_wrong_export_does_not_pass_the_check(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "model.layers.0.self_attn.q_proj.weight", lambda values: values.flip(0))
    with pytest.raises(Z2aError, match="nothing was written"):
        export_run(run, tmp_path / "hf", check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_export_that_computes_nan_does_not_pass_the_check(
    dtype: ExportDtype, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "model.norm.weight", lambda values: values * torch.nan)
    with pytest.raises(Z2aError, match="the logits differ by nan"):
        export_run(run, tmp_path / "hf", dtype=dtype, check=True)


def test_only_an_export_is_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="something else"):
        export_run(run, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    export_run(run, tmp_path / "hf")
    export_run(run, tmp_path / "hf")  # an export may replace an export


def test_a_step_without_a_checkpoint_is_reported(run: Run, tmp_path: Path) -> None:
    with pytest.raises(Z2aError, match="steps there: 8, 12"):
        export_run(run, tmp_path / "hf", step=3)


def test_what_is_published_names_no_path_and_no_service(workspace: Path, tiny_run: Run, tmp_path: Path) -> None:
    base = tiny_run.directory
    run = train_run(workspace, tmp_path / "my_runs" / "of_mine", "train.steps=2", f"train.init={base}")
    line = {"kind": "probes", "suite": "s", "name": "n", "value": 0.5, "metric": "m", "better": "higher", "digest": "d"}
    append_evals(run.directory, [EvalLine(**line, step=step, error=None, time=time.time()) for step in (1, 2)])
    export_run(run, tmp_path / "hf", check=False)
    for name in ("README.md", "manifest.json"):
        text = (tmp_path / "hf" / name).read_text()
        assert str(tmp_path) not in text
        assert str(base) not in text
    assert "| s | n |" in (tmp_path / "hf" / "README.md").read_text()
    assert _without_private({"grpo": {"endpoint": "http://u:secret@host/v1", "loss": "dapo"}}) == {
        "grpo": {"loss": "dapo"}
    }
