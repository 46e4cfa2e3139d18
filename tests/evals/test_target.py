"""What is evaluated: a run, a checkpoint of a run, or a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.ranks import on_ranks
from tests.train.test_initial_weights import ARCHITECTURES, write_hf
from zero2all.base.errors import UsageError, Z2aError
from zero2all.evals import open_target
from zero2all.evals.target import find_target
from zero2all.export import export_run
from zero2all.model import Z2all
from zero2all.recipe import ParallelRecipe
from zero2all.train import Run

TOKENS = torch.arange(5, 30)[None]


@pytest.fixture(scope="module")
def run(three_checkpoints: Run) -> Run:
    return three_checkpoints


@pytest.fixture(scope="module")
def exported(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "hf"
    export_run(run, out)
    return out


def same_logits(one: Z2all, other: Z2all) -> bool:
    with torch.inference_mode():
        return torch.equal(one(TOKENS), other(TOKENS))


def test_a_run_is_its_newest_checkpoint_or_the_one_of_a_step(run: Run) -> None:
    newest, second = open_target(str(run.recipe.out)), open_target(str(run.directory), step=2)
    assert (newest.step, newest.directory, newest.name) == (3, run.directory, str(run.recipe.out))
    assert (second.step, second.directory) == (2, run.directory)
    assert same_logits(newest.model, run.load_model(3))
    assert same_logits(second.model, run.load_model(2))
    assert not same_logits(newest.model, second.model)
    assert newest.tokenizer.fingerprint == run.tokenizer().fingerprint
    assert not newest.model.training


def test_a_checkpoint_directory_is_that_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.checkpoints.path(2)
    target = open_target(str(path))
    assert (target.step, target.directory) == (2, run.directory)
    assert same_logits(target.model, run.load_model(2))
    monkeypatch.chdir(path.parent)
    assert open_target(path.name).step == 2


def test_an_export_is_the_run_it_was_exported_from(run: Run, exported: Path) -> None:
    target = open_target(f"{exported}/")
    assert (target.step, target.directory, target.name) == (None, exported, str(exported))
    assert same_logits(target.model, run.load_model(3))
    text = "the model 春眠不觉晓"
    assert target.tokenizer.encode(text) == run.tokenizer().encode(text)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_hugging_face_directory_has_the_logits_of_transformers(kind: str, workspace: Path, tmp_path: Path) -> None:
    theirs = write_hf(tmp_path, kind, workspace / "tokenizer")
    target = open_target(str(tmp_path))
    with torch.inference_mode():
        assert (target.model(TOKENS) - theirs(TOKENS).logits).abs().max() <= 1e-3  # of logits of about 50


def test_a_tokenizer_of_sentencepiece_alone_is_read(exported: Path, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("the model reads a line of text\n" * 50)
    prefix = str(tmp_path / "sp")
    options = {
        "model_type": "bpe",
        "vocab_size": 320,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=prefix, hard_vocab_limit=False, minloglevel=2, **options
    )
    hf = tmp_path / "hf"
    shutil.copytree(exported, hf)
    for name in ("tokenizer.json", "tokenizer_config.json", "manifest.json"):
        (hf / name).unlink()
    shutil.copy(f"{prefix}.model", hf / "tokenizer.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    target = open_target(str(hf))
    assert target.tokenizer.encode("the line of text") == processor.encode("the line of text")


def test_what_cannot_be_evaluated_is_refused_with_the_reason(run: Run, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not the directory of a run, of a checkpoint"):
        open_target(str(tmp_path / "nothing"))
    with pytest.raises(Z2aError, match=r"no valid checkpoint of step 9 in .* steps there: 1, 2, 3"):
        open_target(str(run.directory), step=9)
    damaged = tmp_path / "damaged"
    shutil.copytree(run.directory, damaged)
    for manifest in damaged.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(Z2aError, match=r"no valid checkpoint in .*damaged; steps there: 1, 2, 3"):
        open_target(str(damaged))
    with pytest.raises(UsageError, match="--step is for the checkpoints of a run"):
        open_target(str(exported), step=1)
    with pytest.raises(UsageError, match="is one checkpoint"):
        open_target(str(run.checkpoints.path(2)), step=2)
    alone = tmp_path / "step-00000002"
    shutil.copytree(run.checkpoints.path(2), alone)
    with pytest.raises(UsageError, match="give the directory of the run, with --step 2"):
        open_target(str(alone))


def test_a_directory_with_files_of_other_models_is_refused(exported: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(exported, hf)
    definition = (hf / "tokenizer.json").read_bytes()
    (hf / "tokenizer.json").unlink()
    with pytest.raises(Z2aError, match="no tokenizer in"):
        open_target(str(hf))
    (hf / "tokenizer.json").write_bytes(definition)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with pytest.raises(Z2aError, match="512 tokens, and the model 300 rows: it is the tokenizer of another model"):
        open_target(str(hf))
    (hf / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    with pytest.raises(Z2aError, match="gpt2"):
        open_target(str(hf))


def test_a_damaged_export_is_refused(exported: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(exported, hf)
    weights = bytearray((hf / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (hf / "model.safetensors").write_bytes(weights)
    with pytest.raises(Z2aError, match="does not match its checksum"):
        open_target(str(hf))


def _parallel_losses(path: str) -> torch.Tensor:
    model = find_target(path).load_parallel_model(ParallelRecipe(tp=2, pp=2, dp_shard=1, sp=False))
    return model.all_reduce_sum(model.eval_losses(TOKENS[:, :-1], TOKENS[:, 1:]))  # the last stage has them


@pytest.mark.long
def test_a_hugging_face_directory_is_read_over_ranks(exported: Path) -> None:
    with torch.inference_mode():
        expected = open_target(str(exported)).model(TOKENS[:, :-1], targets_BS=TOKENS[:, 1:])
    for losses in on_ranks(4, _parallel_losses, str(exported)):
        torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0)
