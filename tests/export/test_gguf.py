"""GGUF files in llama.cpp: log-probabilities, token ids, the chat template and where a text begins and ends."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chats import CHATS
from tests.conftest import CHINESE, ENGLISH, tiny_recipe
from tests.export.variants import VARIANTS as SHARED
from tests.export.variants import YARN
from tests.model.helpers import EXPERTS, SMALL, make
from zero2all.base.errors import UsageError
from zero2all.export import export_run
from zero2all.export.gguf_file import GGUFDtype, gguf_incompatibility, write_gguf
from zero2all.export.run_export import LlamaCpp
from zero2all.model import Z2all
from zero2all.model.weights import ModelWeights
from zero2all.recipe import ModelConfig
from zero2all.tokenizer import Tokenizer
from zero2all.train import Run

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (xllamacpp)")
pytest.importorskip("gguf", reason="gguf is not installed")

PROMPTS = 20
VARIANTS: dict[str, dict[str, Any]] = SHARED | {
    "llama, tied, mqa": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama, wide heads": {"head_dim": 32},
    "qwen3, yarn": {"qk_norm": True, "rope_scaling": YARN},
    "qwen3-moe, tied": {"qk_norm": True, "tie_word_embeddings": True, "moe": EXPERTS},
}


@pytest.fixture(scope="module")
def tokenizer(workspace: Path) -> Tokenizer:
    return Tokenizer(tiny_recipe(workspace).tokenizer_dir)


def random_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(2, longest))] for _ in range(PROMPTS)]


@torch.inference_mode()
def largest_difference(model: Z2all, engine: LlamaCpp, prompts: list[list[int]]) -> float:
    largest = 0.0
    for prompt in prompts:
        ours = model(torch.tensor([prompt]))[0, -1].log_softmax(-1)
        theirs = engine.logprobs(prompt)
        assert len(theirs) >= 64
        largest = max(largest, *(abs(float(ours[id]) - value) for id, value in theirs.items()))
    return largest


def made(tokenizer: Tokenizer, **changes: Any) -> Z2all:
    return make(vocab_size=tokenizer.vocab_size, max_position_embeddings=256, **changes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_cpp_computes_the_same_log_probabilities(variant: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = made(tokenizer, **VARIANTS[variant])
    write_gguf(tmp_path / "a.gguf", ModelWeights(model), tokenizer, "f32", "a", None)
    engine = LlamaCpp(tmp_path / "a.gguf", 256)
    assert largest_difference(model, engine, random_prompts(tokenizer.vocab_size, 200)) <= 1e-3


def test_rows_of_queries_and_keys_in_our_order_are_seen(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy tokens alone often agree with that mistake."""
    monkeypatch.setattr("zero2all.export.gguf_file._interleave", lambda weight, heads: weight)
    model = made(tokenizer)
    write_gguf(tmp_path / "a.gguf", ModelWeights(model), tokenizer, "f32", "a", None)
    engine = LlamaCpp(tmp_path / "a.gguf", 256)
    assert largest_difference(model, engine, random_prompts(tokenizer.vocab_size, 200)) > 0.05


@pytest.mark.parametrize(("dtype", "limit"), [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.3), ("q4_0", 2.0)])
def test_smaller_types_stay_close(dtype: GGUFDtype, limit: float, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = made(tokenizer, qk_norm=True)
    sizes = {}
    for kind in ("f32", dtype):
        write_gguf(tmp_path / kind, ModelWeights(model), tokenizer, kind, "a", None)  # type: ignore[arg-type]
        sizes[kind] = (tmp_path / kind).stat().st_size
    assert sizes[dtype] < 0.75 * sizes["f32"]
    engine = LlamaCpp(tmp_path / dtype, 256)
    assert largest_difference(model, engine, random_prompts(tokenizer.vocab_size, 60)) < limit


def test_what_llama_cpp_does_not_compute_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for changes, named in [
        ({"qk_norm": True, "sliding_window": 8}, "sliding_window"),
        ({"qk_norm": True, "qkv_bias": True}, "qkv_bias"),
        ({"qkv_bias": True, "head_dim": 32}, "head_dim"),
        ({"qk_norm": True, "moe": {**EXPERTS, "norm_topk_prob": False}}, "norm_topk_prob"),
        ({"qk_norm": True, "moe": {**EXPERTS, "first_k_dense_replace": 1}}, "first_k_dense_replace"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}},
            "rope_type",
        ),
    ]:
        config = ModelConfig.model_validate({**SMALL, **changes})
        assert named in str(gguf_incompatibility(config))
        with pytest.raises(UsageError, match=named):
            write_gguf(tmp_path / "a.gguf", ModelWeights(Z2all(config)), tokenizer, "f32", "a", None)


@pytest.fixture(scope="module")
def run(tiny_run: Run) -> Run:
    return tiny_run


@pytest.fixture(scope="module")
def engine(run: Run, tmp_path_factory: pytest.TempPathFactory) -> LlamaCpp:
    out = tmp_path_factory.mktemp("engine") / "gguf"
    export_run(run, out, format="gguf", check=False)
    return LlamaCpp(next(out.glob("*.gguf")))


def test_a_run_is_exported_compared_and_described(run: Run, tmp_path: Path) -> None:
    result = export_run(run, tmp_path / "gguf", format="gguf", dtype="f32", check=True)
    assert result.engine == "llama.cpp"
    assert result.max_difference is not None
    assert result.max_difference <= 1e-3
    assert {path.name for path in (tmp_path / "gguf").iterdir()} == {
        "README.md", "loss.svg", "manifest.json", f"{run.recipe.name}-f32.gguf",
    }  # fmt: skip
    card = (tmp_path / "gguf" / "README.md").read_text()
    assert "llama.cpp" in card
    assert f"llama-completion -m {run.recipe.name}-f32.gguf" in card
    assert json.loads((tmp_path / "gguf" / "manifest.json").read_text())["result"]["max_difference"] < 1e-3


def test_token_ids_are_the_same(run: Run, engine: LlamaCpp) -> None:
    tokenizer = run.tokenizer()
    texts = [
        *ENGLISH.splitlines(),
        *CHINESE.splitlines(),
        "a  b\n\n c\t12345 it's 你好，world！\r\n",
        "é🙂\u200d<|im_end|>",
    ]
    for text in filter(None, texts):
        body = {"content": text, "add_special": False, "parse_special": False}
        assert engine.post("/tokenize", body)["tokens"] == tokenizer.encode(text)


def test_text_begins_and_ends_as_in_training(run: Run, engine: LlamaCpp) -> None:
    tokenizer = run.tokenizer()
    ids = engine.post("/tokenize", {"content": "hello", "add_special": True})["tokens"]
    assert ids == [tokenizer.eos_token_id, *tokenizer.encode("hello")]
    bias = [
        [token, -100.0 if token not in tokenizer.stop_token_ids[1:] else 100.0]
        for token in (5, *tokenizer.stop_token_ids)
    ]
    answer = engine.complete({"prompt": ids, "n_predict": 8, "logit_bias": bias, "temperature": 0.0})
    assert answer["stop_type"] == "eos"


def test_the_chat_template_is_rendered_the_same(run: Run, engine: LlamaCpp) -> None:
    tokenizer = run.tokenizer()
    for messages in CHATS:
        prompt = engine.post("/apply-template", {"messages": messages})["prompt"]
        ids = engine.post("/tokenize", {"content": prompt, "add_special": False, "parse_special": True})["tokens"]
        assert ids == tokenizer.render_chat(messages, add_generation_prompt=True)


def test_a_sentencepiece_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    from tests.tokenizer.sentencepiece_models import llama_style
    from zero2all.tokenizer.import_export import import_tokenizer

    (tmp_path / "a.model").write_bytes(llama_style())
    import_tokenizer(tmp_path / "a.model", tmp_path / "tokenizer")
    tokenizer = Tokenizer(tmp_path / "tokenizer")
    write_gguf(tmp_path / "a.gguf", ModelWeights(made(tokenizer)), tokenizer, "f32", "a", None)
    engine = LlamaCpp(tmp_path / "a.gguf")
    for text in [*ENGLISH.splitlines()[:20], *CHINESE.splitlines()[:20], "a  b\n\n12345 你好，world！🙂"]:
        if text:
            assert engine.tokenize(text) == tokenizer.encode(text), text
