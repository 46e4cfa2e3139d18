"""``z2a export``: a checkpoint and its tokenizer as one Hugging Face directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from zero2all.errors import UsageError, Z2aError, need
from zero2all.io import atomic_dir
from zero2all.model import export_hf
from zero2all.train.run import Run

TOLERANCE = 1e-4
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "床前明月光，疑是地上霜。举头望明月，低头思故乡。",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "混合 text：import os  # 读取文件\n",
)


def export_run(run: Run, out: Path, step: int | None = None, bf16: bool = False, check: bool = False) -> dict[str, Any]:
    """Write the newest (or a given) checkpoint to ``out``; with ``check``, compare its logits in transformers."""
    if out.exists() and not (out / "config.json").exists() and any(out.iterdir()):
        raise UsageError(f"{out} holds something else than an export; choose another directory")
    model, tokenizer = run.load_model(step), run.tokenizer()
    with atomic_dir(out) as partial:
        export_hf(model, partial, tokenizer.end_of_text, torch.bfloat16 if bf16 else torch.float32)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer.directory / name, partial / name)
    result: dict[str, Any] = {"out": str(out), "parameters": sum(p.numel() for p in model.parameters())}
    if check:
        result["max_logit_difference"] = logit_difference(run, out, step)
        if not bf16 and result["max_logit_difference"] > TOLERANCE:
            raise Z2aError(
                f"the export disagrees with the model: logits differ by {result['max_logit_difference']:.2e}"
            )
    return result


@torch.inference_mode()
def logit_difference(run: Run, exported: Path, step: int | None = None) -> float:
    """The largest absolute difference of any logit between our model and transformers, in fp32."""
    transformers = need("transformers", "hf")
    ours, ours_tokenizer = run.load_model(step), run.tokenizer()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    worst = 0.0
    for text in PROBES:
        ids = ours_tokenizer.encode(text)
        if theirs_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise Z2aError(f"the exported tokenizer cuts {text!r} differently")
        tokens = torch.tensor([ids])
        worst = max(worst, float((ours(tokens) - theirs(tokens).logits).abs().max()))
    return worst
