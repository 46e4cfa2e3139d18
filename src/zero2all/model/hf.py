"""To and from Hugging Face directories of standard architectures, so that no consumer needs our code.

Llama; Qwen2 where queries, keys and values have a bias; Qwen3 where queries and keys are normed; Qwen3-MoE where
there are experts besides.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zero2all.io import write_json
from zero2all.model.hf_config import hf_config
from zero2all.model.hf_weights import CONFIG, INDEX, WEIGHTS, HFWeights, hf_weights
from zero2all.model.weights import load_model
from zero2all.model.z2all import Z2all

SHARD_BYTES = 2 * 2**30


def export_hf(
    model: Z2all,
    out: Path,
    end_ids: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config and weights to an existing directory. Beside the model only one shard is in memory at a time.

    ``end_ids`` are the tokens at which generation ends, that of a document first.
    """
    from safetensors.torch import save_file

    end_of_text = end_ids[0] if end_ids else None
    write_json(out / CONFIG, hf_config(model.config, end_of_text, str(dtype).removeprefix("torch.")))
    write_json(out / "generation_config.json", {"eos_token_id": list(end_ids) or None, "do_sample": False})
    weights = hf_weights(model)
    shards = list(_shards(weights, dtype.itemsize, shard_bytes))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        part = {name: weights[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_file(part, str(out / file), metadata={"format": "pt"})
        shutil.copymode(out / CONFIG, out / file)  # safetensors lets only the owner read it
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        size = sum(weight.numel() for weight in weights.values()) * dtype.itemsize
        write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": files})


def _shards(weights: dict[str, Tensor], itemsize: int, limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, weight in weights.items():
        mine = weight.numel() * itemsize
        if names and size + mine > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += mine
    yield names


def load_hf(directory: Path, device: str = "cpu") -> Z2all:
    """A model in fp32 from a Hugging Face directory of a supported architecture, one tensor in memory beside it.

    >>> model = load_hf(Path("Qwen3-0.6B"))
    """
    return load_model(HFWeights(directory), device)
