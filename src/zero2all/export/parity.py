"""Does another program compute the same as our model? Compared on fixed texts, token for token."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zero2all.errors import Z2aError, need, quiet_libraries
from zero2all.http_client import shared_client
from zero2all.model import Z2all
from zero2all.tokenizer import Tokenizer

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "床前明月光，疑是地上霜。举头望明月，低头思故乡。",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "混合 text：import os  # 读取文件\n",
)
TOP_TOKENS = 64  # whose log-probabilities are compared at a position
CONTEXT = 512
TIMEOUT = 600.0  # of one request


@torch.inference_mode()
def transformers_difference(model: Z2all, tokenizer: Tokenizer, exported: Path, begin_id: int | None) -> float:
    """Largest absolute logit difference between our model and transformers, in fp32."""
    transformers = need("transformers", "hf")
    transformers.utils.logging.disable_progress_bar()
    with quiet_libraries():  # it imports what it finds installed, torchao among it
        theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
        theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    differences = []
    for text in PROBES:
        ids = prompt_ids(tokenizer, text, begin_id)
        if theirs_tokenizer(text)["input_ids"] != ids:
            raise Z2aError(f"nothing was written: the exported tokenizer splits {text!r} differently")
        tokens = torch.tensor([ids[: model.config.max_position_embeddings]])
        differences.append((model(tokens) - theirs(tokens).logits).abs().max())
    return float(torch.stack(differences).max())  # NaN if one of them is, unlike that of Python


def prompt_ids(tokenizer: Tokenizer, text: str, begin_id: int | None) -> list[int]:
    return [*([] if begin_id is None else [begin_id]), *tokenizer.encode(text)]


class LlamaCpp:
    """A GGUF file in llama.cpp, in this process, with the arithmetic of the CPU in fp32.

    >>> engine = LlamaCpp(Path("model-f32.gguf"))
    >>> engine.logprobs([1, 2, 3])  # of the likeliest next tokens, by id
    """

    def __init__(self, path: Path, context: int = CONTEXT, slots: int = 1) -> None:
        """``slots`` requests, of ``context`` tokens each, are generated at the same time."""
        xllamacpp = _xllamacpp()
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.port = context * slots, slots, False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.use_jinja, params.verbosity, params.ui = True, -1, False
        self._server = xllamacpp.Server(params)
        self._text_token: int = self.post("/tokenize", {"content": "a", "add_special": False})["tokens"][0]

    @property
    def address(self) -> str:
        """Of its HTTP server, on loopback."""
        return str(self._server.listening_address)

    def logprobs(self, ids: Sequence[int], top: int = TOP_TOKENS) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens after a prompt."""
        # It reports none after a special token, so another one is generated; the reported ones are without this bias.
        request = {"n_predict": 1, "n_probs": top, "temperature": 0.0, "logit_bias": [[self._text_token, 1e4]]}
        answer = self.complete({"prompt": list(ids), **request})
        [position] = answer["completion_probabilities"]
        return {entry["id"]: entry["logprob"] for entry in position["top_logprobs"]}

    def tokenize(self, text: str) -> list[int]:
        """With the token that text begins with, if the file names one."""
        ids: list[int] = self.post("/tokenize", {"content": text, "add_special": True})["tokens"]
        return ids

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.post("/completion", {"cache_prompt": False, **request})
        return answer

    def post(self, path: str, request: dict[str, Any]) -> Any:
        """What its HTTP server answers."""
        client = shared_client(TIMEOUT, trust_env=False)  # on loopback, where no proxy leads
        reply = client.post(f"{self.address}{path}", json=request)
        if reply.status_code != 200:
            raise Z2aError(f"llama.cpp: {reply.text[:200]}")
        return reply.json()


def _xllamacpp() -> Any:
    try:
        return importlib.import_module("xllamacpp")
    except ImportError:
        raise Z2aError("--check of a GGUF file runs llama.cpp: pip install xllamacpp") from None


@torch.inference_mode()
def llama_cpp_difference(model: Z2all, tokenizer: Tokenizer, path: Path, begin_id: int | None) -> float:
    """Largest absolute difference of log-probabilities between our model and llama.cpp, over its likeliest tokens."""
    context = min(CONTEXT, model.config.max_position_embeddings)
    engine = LlamaCpp(path)
    differences = []
    for text in PROBES:
        ids = prompt_ids(tokenizer, text, begin_id)
        if engine.tokenize(text) != ids:
            raise Z2aError(f"nothing was written: llama.cpp splits {text!r} differently")
        for length in sorted({len(ids) // 2, len(ids)}):
            prompt = ids[: min(length, context - 2)]
            ours = model(torch.tensor([prompt]))[0, -1, : tokenizer.vocab_size].log_softmax(-1)
            differences += [abs(float(ours[id]) - logprob) for id, logprob in engine.logprobs(prompt).items()]
    return float(torch.tensor(differences).max())
