"""lm-eval scores a checkpoint as it scores the export with transformers, item by item, and without a network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("lm_eval", reason="lm-eval is not installed: see requirements.txt")
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from typer.testing import CliRunner

from tests.runs import train_run
from zero2all.base.errors import UsageError
from zero2all.cli.main import app
from zero2all.evals import open_target
from zero2all.evals.lm_eval_model import Z2allLM, run_lm_eval
from zero2all.export import export_run
from zero2all.train import Run

ITEMS = 100  # of each task
TOLERANCE = 1e-4  # nats
CMMLU = {
    "test_split": "test", "fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"},
    "output_type": "multiple_choice",
    "doc_to_text": "{{Question.strip()}}\nA. {{A}}\nB. {{B}}\nC. {{C}}\nD. {{D}}\n答案：",
    "doc_to_choice": ["A", "B", "C", "D"], "doc_to_target": "{{['A', 'B', 'C', 'D'].index(Answer)}}",
    "description": "以下是关于古汉语的单项选择题，请直接给出正确答案的选项。\n\n",
}  # fmt: skip
ARC = {
    "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{choices.label.index(answerKey)}}", "doc_to_choice": "{{choices.text}}",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    options = ["train.steps=20", "model.max_position_embeddings=512", "model.initializer_range=0.2"]
    return train_run(workspace, tmp_path_factory.mktemp("lm-eval"), *options)


@pytest.fixture(scope="module")
def hf_backend(run: Run, tmp_path_factory: pytest.TempPathFactory) -> HFLM:
    """lm-eval's own backend on the export. Its tokenizer begins a text with end-of-text, as a document begins."""
    directory = tmp_path_factory.mktemp("export") / "hf"
    export_run(run, directory)
    end = run.tokenizer().eos_token_id
    options = {"dtype": "float32", "device": "cpu", "batch_size": 8}
    return HFLM(str(directory), add_bos_token=True, prefix_token_id=end, **options)


@pytest.fixture(scope="module")
def tasks(shared_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lm-eval's ARC and CMMLU on local files."""
    folder, files = tmp_path_factory.mktemp("tasks"), shared_corpus / "eval"
    write_task(folder, "local_arc", ARC, "json", {"test": str(files / "arc_easy_test.jsonl")})
    cmmlu = {split: str(files / "cmmlu" / split / "ancient_chinese.csv") for split in ("dev", "test")}
    write_task(folder, "local_cmmlu", CMMLU, "csv", cmmlu)
    return folder


def write_task(folder: Path, name: str, task: dict[str, Any], kind: str, files: dict[str, str]) -> None:
    content = {"task": name, "dataset_path": kind, "dataset_kwargs": {"data_files": files}, **task}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")


def evaluate(model: Any, tasks: Path, task: str, fewshot: int) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=[task], num_fewshot=fewshot, limit=ITEMS, task_manager=manager, log_samples=True
    )
    assert found is not None
    return found


@pytest.mark.parametrize(("task", "fewshot"), [("local_arc", 0), ("local_cmmlu", 0), ("local_cmmlu", 2)])
def test_log_likelihoods_are_those_of_lm_eval_with_transformers(
    task: str, fewshot: int, run: Run, hf_backend: HFLM, tasks: Path
) -> None:
    found = evaluate(Z2allLM(open_target(str(run.directory))), tasks, task, fewshot)
    expected = evaluate(hf_backend, tasks, task, fewshot)
    ours, theirs = found["samples"][task], expected["samples"][task]
    assert len(ours) == len(theirs) == ITEMS
    for one, other in zip(ours, theirs, strict=True):
        assert one["doc_hash"] == other["doc_hash"]
        for (nats, greedy), (expected_nats, expected_greedy) in zip(
            one["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(nats) == pytest.approx(float(expected_nats), abs=TOLERANCE)
            assert greedy == expected_greedy
    assert found["results"][task]["acc,none"] == expected["results"][task]["acc,none"]


def test_texts_longer_than_the_context_have_the_same_log_likelihood(run: Run, hf_backend: HFLM) -> None:
    text = "The quick brown fox jumps over the lazy dog. 敏捷的棕色狐狸跳过了懒狗。" * 40
    requests = [Instance("loglikelihood_rolling", {}, (part,), 0) for part in (text, text[:50], "x")]
    ours = Z2allLM(open_target(str(run.directory))).loglikelihood_rolling(requests)
    hf_backend.add_bos_token = False  # lm-eval begins a text with the prefix token itself here
    try:
        expected = hf_backend.loglikelihood_rolling(requests)
    finally:
        hf_backend.add_bos_token = True
    assert ours == pytest.approx(expected, rel=1e-5)


def test_greedy_answers_are_those_of_transformers(run: Run, hf_backend: HFLM) -> None:
    arguments = {"until": ["\n", "。"], "max_gen_toks": 24, "do_sample": False}
    prompts = ["Once upon a time", "从前", "def main("]
    requests = [Instance("generate_until", {}, (prompt, arguments), 0) for prompt in prompts]
    ours = Z2allLM(open_target(str(run.directory))).generate_until(requests)
    assert ours == hf_backend.generate_until(requests)


def test_a_task_is_run_by_the_command(run: Run, tasks: Path) -> None:
    options = ["--include-path", str(tasks), "--limit", "5", "--json"]
    done = CliRunner().invoke(app, ["eval", "lm-eval", str(run.directory), "local_arc", *options])
    assert done.exit_code == 0, done.output
    found = {metric["metric"]: metric for metric in json.loads(done.stdout)["metrics"]}
    assert found["acc"]["items"] == 5
    assert found.keys() == {"acc", "acc_norm"}


def test_an_unknown_task_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="no task 'nonsense'"):
        run_lm_eval(open_target(str(run.directory)), ["nonsense"])


def test_a_parameter_that_generation_does_not_have_is_refused(run: Run) -> None:
    request = Instance("generate_until", {}, ("x", {"until": [], "num_beams": 4}), 0)
    with pytest.raises(UsageError, match="num_beams"):
        Z2allLM(open_target(str(run.directory))).generate_until([request])
