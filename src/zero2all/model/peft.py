"""Adapters in the format of PEFT, so that every program that reads those can use them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from zero2all.errors import UsageError
from zero2all.io import write_json
from zero2all.model.lora import adapters
from zero2all.model.z2all import Z2all

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model."


def export_adapter(model: Z2all, out: Path, base: str, dtype: torch.dtype = torch.float32) -> None:
    """Write the adapters of a model to an existing directory. ``base`` is where the base model is."""
    from safetensors.torch import save_file

    lora = model.config.lora
    if lora is None:
        raise UsageError("this model has no adapters: it was trained without model.lora")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in adapters(model)}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(out / CONFIG, config)
    weights = {
        f"{PREFIX}{name}.{matrix}.weight": getattr(module, matrix).detach().to("cpu", dtype).contiguous()
        for name, module in adapters(model)
        for matrix in ("lora_A", "lora_B")
    }
    save_file(weights, str(out / WEIGHTS), metadata={"format": "pt"})
    shutil.copymode(out / CONFIG, out / WEIGHTS)  # safetensors lets only the owner read it
