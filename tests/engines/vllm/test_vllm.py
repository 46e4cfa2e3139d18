"""vLLM on what we export: log-probabilities of every architecture, token ids, the chat template, where a text ends.

Versions that vLLM pins exclude ours, so it runs as another program: ``Z2A_VLLM_PYTHON`` is the Python that has it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chats import CHATS
from tests.conftest import CHINESE, ENGLISH, tiny_recipe
from tests.export.variants import VARIANTS as SHARED
from tests.export.variants import YARN
from tests.model.helpers import EXPERTS, make
from zero2all.export import export_run
from zero2all.model import Z2all, export_hf
from zero2all.tokenizer import Tokenizer
from zero2all.train import Run, train

PYTHON = os.environ.get("Z2A_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1800),  # the first test waits for all models
    pytest.mark.skipif(PYTHON is None, reason="Z2A_VLLM_PYTHON is not set: the Python of a venv with requirements.txt"),
]
TOLERANCE = 1e-3  # nats, in fp32
PROMPTS = 20
CONTEXT = 256
VARIANTS: dict[str, dict[str, Any]] = SHARED | {
    "llama, tied, mqa, wide heads": {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 64},
    "qwen2, window": {"qkv_bias": True, "sliding_window": 24},
    "qwen3, bias, window, yarn": {"qk_norm": True, "qkv_bias": True, "sliding_window": 24, "rope_scaling": YARN},
    "qwen3-moe, window, dense layer": {
        "qk_norm": True,
        "sliding_window": 24,
        "moe": {**EXPERTS, "first_k_dense_replace": 1, "norm_topk_prob": False},
    },
}
TEXTS = [
    "hello",
    *ENGLISH.splitlines(),
    *CHINESE.split(),
    "def f(x):\n    return x  # 第一个\n",
    "a  b\n\n c\t12345 it's",
]


@pytest.fixture(scope="module")
def tokenizer(workspace: Path) -> Tokenizer:
    return Tokenizer(tiny_recipe(workspace).tokenizer_dir)


@pytest.fixture(scope="module")
def answers(workspace: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM says of each variant and of a run. One program loads them all: its start takes longest."""
    folder = tmp_path_factory.mktemp("vllm")
    requests = {name: request(export_variant(name, tokenizer, folder), prompts=prompts(tokenizer)) for name in VARIANTS}
    forced = [*tokenizer.stop_token_ids, tokenizer.encode("a")[0]]
    requests["run"] = request(export_tiny_run(workspace, folder), texts=TEXTS, chats=CHATS, forced=forced)
    (folder / "requests.json").write_text(json.dumps([*requests.values()]))
    files = [Path(__file__).with_name("ask_vllm.py"), folder / "requests.json", folder / "answers.json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # ours
    finished = subprocess.run([str(PYTHON), *files], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-5000:]
    return dict(zip(requests, json.loads((folder / "answers.json").read_text()), strict=True))


def request(model: Path, **wanted: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {"prompts": [], "texts": [], "chats": [], "forced": []}
    return {"model": str(model), "context": CONTEXT, **nothing, **wanted}


def made(name: str, tokenizer: Tokenizer) -> Z2all:
    """Heads of 32: the CPU kernel has none smaller."""
    size = {"hidden_size": 128, "max_position_embeddings": CONTEXT, "vocab_size": tokenizer.vocab_size}
    return make(**size, **VARIANTS[name])


def export_variant(name: str, tokenizer: Tokenizer, folder: Path) -> Path:
    out = folder / name
    shutil.copytree(tokenizer.directory, out)
    export_hf(made(name, tokenizer), out, tokenizer.stop_token_ids)
    return out


def export_tiny_run(workspace: Path, folder: Path) -> Path:
    options = ["train.steps=4", "model.head_dim=32", f"model.max_position_embeddings={CONTEXT}"]
    recipe = tiny_recipe(workspace, f"out={folder / 'runs'}", *options)
    train(recipe)
    export_run(Run.open(recipe.run_dir), folder / "run")
    return folder / "run"


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(2, 200))] for _ in range(PROMPTS)]


@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_vllm_computes_the_same_log_probabilities(variant: str, answers: dict[str, Any], tokenizer: Tokenizer) -> None:
    model, differences = made(variant, tokenizer), []
    for prompt, theirs in zip(prompts(tokenizer), answers[variant]["logprobs"], strict=True):
        ours = model(torch.tensor([prompt]))[0].log_softmax(-1)
        differences += [
            ours[i, id] - value for i, (id, value) in enumerate(zip(prompt[1:], theirs["prompt"], strict=True))
        ]
        assert len(theirs["next"]) >= 20
        differences += [ours[-1, int(id)] - value for id, value in theirs["next"].items()]
    assert torch.stack(differences).abs().max() <= TOLERANCE


def test_a_text_begins_as_in_training(answers: dict[str, Any], tokenizer: Tokenizer) -> None:
    for text, ids in zip(TEXTS, answers["run"]["texts"], strict=True):
        assert ids == [tokenizer.eos_token_id, *tokenizer.encode(text)]


def test_the_chat_template_is_rendered_the_same(answers: dict[str, Any], tokenizer: Tokenizer) -> None:
    for messages, ids in zip(CHATS, answers["run"]["chats"], strict=True):
        assert ids == tokenizer.render_chat(messages, add_generation_prompt=True)


def test_generation_ends_with_a_document_or_message(answers: dict[str, Any], tokenizer: Tokenizer) -> None:
    *ended, went_on = answers["run"]["forced"]
    assert [answer["ids"] for answer in ended] == [[id] for id in tokenizer.stop_token_ids]
    assert {answer["finish_reason"] for answer in ended} == {"stop"}
    assert (len(went_on["ids"]), went_on["finish_reason"]) == (4, "length")
