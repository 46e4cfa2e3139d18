"""To and from Hugging Face directories of standard architectures, so that no consumer needs our code.

Llama; Qwen2 where queries, keys and values have a bias; Qwen3 where queries and keys are normed. With experts,
Qwen3-MoE where the router is a softmax, and GLM-4-MoE where it is a sigmoid. Adapters in the format of PEFT,
so that every program that reads those can use them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from zero2all.base.console import progress
from zero2all.base.errors import UsageError
from zero2all.base.io import write_json
from zero2all.model.hf_config import hf_config
from zero2all.model.hf_weights import CONFIG, INDEX, WEIGHTS, HFTensor, HFWeights, hf_tensors, tied_head
from zero2all.model.lora import adapters
from zero2all.model.weights import ModelWeights, WeightReader, load_model
from zero2all.model.z2all import Z2all

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model.model."
SHARD_BYTES = 2**30  # of a file; safetensors copies it before it writes


def export_hf(
    weights: Z2all | WeightReader,
    out: Path,
    end_ids: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    begin_id: int | None = None,
) -> None:
    """Write config and weights to an existing directory. One shard is in memory at a time.

    ``end_ids`` are the tokens at which generation ends, the document's first; ``begin_id`` is the one that text
    begins with.
    """
    reader = ModelWeights(weights) if isinstance(weights, Z2all) else weights
    end_of_text = end_ids[0] if end_ids else None
    name = str(dtype).removeprefix("torch.")
    write_json(out / CONFIG, {**hf_config(reader.config, end_of_text, name), "bos_token_id": begin_id})
    generation = {"bos_token_id": begin_id, "eos_token_id": list(end_ids) or None, "do_sample": False}
    write_json(out / "generation_config.json", generation)
    tensors = hf_tensors(reader.config) + tied_head(reader.config)
    shards = list(_shards(tensors, dtype.itemsize, shard_bytes))
    files: dict[str, str] = {}
    with progress("writing weights", len(tensors)) as bar:
        for number, shard in enumerate(shards, 1):
            file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            _write_shard(reader, shard, out / file, dtype)
            shutil.copymode(out / CONFIG, out / file)  # safetensors lets only the owner read it
            files |= {tensor.name: file for tensor in shard}
            bar(len(shard))
    if len(shards) > 1:
        size = sum(math.prod(tensor.shape) for tensor in tensors) * dtype.itemsize
        write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": files})


def _write_shard(weights: WeightReader, shard: list[HFTensor], path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    part = {
        tensor.name: tensor.read(weights).detach().to("cpu", torch.float32 if tensor.in_fp32 else dtype).contiguous()
        for tensor in shard
    }
    save_file(part, str(path), metadata={"format": "pt"})


def _shards(tensors: list[HFTensor], itemsize: int, limit: int) -> Iterator[list[HFTensor]]:
    shard: list[HFTensor] = []
    size = 0
    for tensor in tensors:
        mine = math.prod(tensor.shape) * itemsize
        if shard and size + mine > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += mine
    yield shard


def load_hf(directory: Path, device: str = "cpu") -> Z2all:
    """A model in fp32 from a Hugging Face directory of a supported architecture, one tensor in memory beside it.

    >>> model = load_hf(Path("Qwen3-0.6B"))
    """
    return load_model(HFWeights(directory), device)


def export_adapter(model: Z2all, out: Path, base: str, dtype: torch.dtype = torch.float32) -> None:
    """Write the adapters of a model in the format of PEFT. ``base`` is where the base model is."""
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
    write_json(out / ADAPTER_CONFIG, config)
    weights = {
        f"{ADAPTER_PREFIX}{name}.{matrix}.weight": getattr(module, matrix).detach().to("cpu", dtype).contiguous()
        for name, module in adapters(model)
        for matrix in ("lora_A", "lora_B")
    }
    save_file(weights, str(out / ADAPTER_WEIGHTS), metadata={"format": "pt"})
    shutil.copymode(out / ADAPTER_CONFIG, out / ADAPTER_WEIGHTS)  # safetensors lets only the owner read it
