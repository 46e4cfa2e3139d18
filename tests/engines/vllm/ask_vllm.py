"""A program for the Python of vLLM, without zero2all: loads exported models and writes what vLLM makes of prompts.

python ask_vllm.py REQUESTS ANSWERS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# Before vLLM is imported: one process, no network, and no cores of its own choice.
os.environ |= {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

TOP_TOKENS = 20  # whose log-probabilities are reported after a prompt; vLLM reports no more


def ask(request: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(request["model"], dtype="float32", enforce_eager=True, max_model_len=request["context"])
    answer = {
        "logprobs": [logprobs(llm, ids) for ids in request["prompts"]],
        "texts": [prompt_ids(llm.generate(text, SamplingParams(max_tokens=1))) for text in request["texts"]],
        "chats": [prompt_ids(llm.chat(messages, SamplingParams(max_tokens=1))) for messages in request["chats"]],
        "forced": [after_token(llm, token) for token in request["forced"]],
    }
    del llm
    cleanup_dist_env_and_memory()  # else a dense model decides what groups there are for experts
    return answer


def logprobs(llm: LLM, ids: list[int]) -> dict[str, Any]:
    """Of the tokens of a prompt from the second on, and of the likeliest tokens after it."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=TOP_TOKENS)
    [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    positions = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    [after] = output.outputs[0].logprobs
    return {
        "prompt": [position[token].logprob for token, position in positions],
        "next": {token: entry.logprob for token, entry in after.items()},
    }


def prompt_ids(outputs: list[Any]) -> list[int]:
    return list(outputs[0].prompt_token_ids)


def after_token(llm: LLM, token: int) -> dict[str, Any]:
    """What follows if the next token is this one, whatever the model says."""
    [output] = llm.generate("a", SamplingParams(temperature=0, max_tokens=4, logit_bias={token: 100}))
    return {"ids": list(output.outputs[0].token_ids), "finish_reason": output.outputs[0].finish_reason}


if __name__ == "__main__":
    requests, answers = (Path(path) for path in sys.argv[1:])
    answers.write_text(json.dumps([ask(request) for request in json.loads(requests.read_text())]))
