"""``z2a export``: a checkpoint and its tokenizer as a Hugging Face model directory."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from zero2all.errors import Z2aError, need
from zero2all.io import atomic_dir, checksums, write_manifest
from zero2all.model import Z2all, export_hf
from zero2all.model.lora import merge_adapters
from zero2all.model.peft import export_adapter
from zero2all.tokenizer import Tokenizer
from zero2all.train.run import Run, tokenizer_files

KIND = "export"
TOLERANCE = 1e-4
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "床前明月光，疑是地上霜。举头望明月，低头思故乡。",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "混合 text：import os  # 读取文件\n",
)


def export_run(run: Run, out: Path, step: int | None = None, bf16: bool = False, check: bool = False) -> dict[str, Any]:
    """Write the newest (or a given) checkpoint to ``out``; with ``check``, only if transformers computes its logits.

    Adapters (``model.lora``) are merged into the weights.
    """
    if check:
        need("transformers", "hf")
    model, tokenizer = run.load_model(step), run.tokenizer()
    merge_adapters(model)
    result: dict[str, Any] = {"out": str(out), "parameters": sum(p.numel() for p in model.parameters())}
    with atomic_dir(out, KIND) as partial:
        export_hf(model, partial, tokenizer.stop_token_ids, torch.bfloat16 if bf16 else torch.float32)
        for path in tokenizer_files(tokenizer):
            shutil.copy(path, partial / path.name)
        if check:
            result["max_logit_difference"] = logit_difference(model, tokenizer, partial)
            if not bf16 and result["max_logit_difference"] > TOLERANCE:
                difference = result["max_logit_difference"]
                raise Z2aError(f"nothing was written: in transformers the logits differ by {difference:.2e}")
        write_manifest(partial, KIND, {"run": asdict(run.identity()), "files": checksums(partial)})
    return result


def export_adapter_of_run(run: Run, out: Path, step: int | None = None, bf16: bool = False) -> dict[str, Any]:
    """Write the adapters of a run (``model.lora``) to ``out`` in PEFT's format, with the tokenizer."""
    model, tokenizer, init = run.load_model(step), run.tokenizer(), run.initial_weights()
    with atomic_dir(out, KIND) as partial:
        base = init.path if init is not None else ""
        export_adapter(model, partial, base, torch.bfloat16 if bf16 else torch.float32)
        for path in tokenizer_files(tokenizer):
            shutil.copy(path, partial / path.name)
        write_manifest(partial, KIND, {"run": asdict(run.identity()), "files": checksums(partial)})
    return {"out": str(out), "base": base}


@torch.inference_mode()
def logit_difference(model: Z2all, tokenizer: Tokenizer, exported: Path) -> float:
    """Largest absolute logit difference between our model and transformers, in fp32."""
    transformers = need("transformers", "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    max_difference = 0.0
    for text in PROBES:
        ids = tokenizer.encode(text)
        if theirs_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise Z2aError(f"the exported tokenizer splits {text!r} differently")
        tokens = torch.tensor([ids[: model.config.max_position_embeddings]])
        max_difference = max(max_difference, float((model(tokens) - theirs(tokens).logits).abs().max()))
    return max_difference
