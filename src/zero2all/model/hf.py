"""To and from Hugging Face directories of standard architectures, so that no consumer needs our code.

Llama; Qwen2 where queries, keys and values have a bias; Qwen3 where queries and keys are normed; Qwen3-MoE where
there are experts besides. The names of the weights are ours behind ``model.``; one mapping serves both ways.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from zero2all.errors import UsageError, Z2aError
from zero2all.io import read_json, write_json
from zero2all.model.hf_config import from_hf_config, hf_config
from zero2all.model.z2all import Z2all

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 * 2**30


def hf_weights(model: Z2all) -> dict[str, Tensor]:
    """Our weights under their Hugging Face names: views, so that writing to them writes to the model."""
    config, weights = model.config, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:  # a tied head is the embedding, and is stored once
                weights[name] = tensor[: config.vocab_size]
        elif name == "embed_tokens.weight":
            weights[f"model.{name}"] = tensor[: config.vocab_size]
        elif ".experts." in name:
            prefix, _, matrix = name.rpartition(".")
            for number, expert in enumerate(tensor):
                weights[f"model.{prefix}.{number}.{matrix}.weight"] = expert
        elif not name.startswith("mtp."):
            weights[f"model.{name}"] = tensor
    if config.qkv_bias and config.qk_norm:
        # Qwen3 switches the biases of q, k, v and o together; ours has none on o, which is a zero one.
        for layer in range(config.num_hidden_layers):
            weights[f"model.layers.{layer}.self_attn.o_proj.bias"] = torch.zeros(config.hidden_size)
    return weights


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
    write_json(out / "config.json", hf_config(model.config, end_of_text, str(dtype).removeprefix("torch.")))
    write_json(out / "generation_config.json", {"eos_token_id": list(end_ids) or None, "do_sample": False})
    weights = hf_weights(model)
    shards = list(_shards(weights, dtype.itemsize, shard_bytes))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        part = {name: weights[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_file(part, str(out / file), metadata={"format": "pt"})
        shutil.copymode(out / "config.json", out / file)  # safetensors lets only the owner read it
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


@torch.no_grad()
def load_hf(directory: Path, device: str = "cpu") -> Z2all:
    """A model in fp32 from a Hugging Face directory of a supported architecture, one tensor in memory beside it.

    >>> model = load_hf(Path("Qwen3-0.6B"))
    """
    from safetensors import safe_open

    if not (directory / "config.json").exists():
        raise UsageError(f"no Hugging Face model in {directory}: config.json or *.safetensors is missing")
    with torch.device("meta"):
        model = Z2all(from_hf_config(read_json(directory / "config.json"), directory / "config.json"))
    model = model.to_empty(device=device).init_buffers()
    for table in (model.embed_tokens.weight, model.lm_head.weight):
        table[model.config.vocab_size :] = 0.0
    wanted = hf_weights(model)
    missing = set(wanted)
    for path in _weight_files(directory):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name not in wanted:
                    if name == "lm_head.weight" and model.config.tie_word_embeddings:
                        continue  # a second copy of the embedding
                    raise Z2aError(f"{path} holds {name}, which config.json says nothing of")
                _copy(name, file.get_tensor(name), wanted[name])
                missing.discard(name)
    if missing:
        raise Z2aError(f"{directory} lacks {len(missing)} weights, such as {min(missing)}")
    return model.eval()


def _copy(name: str, tensor: Tensor, into: Tensor) -> None:
    if tensor.shape != into.shape:
        raise Z2aError(f"{name} has shape {list(tensor.shape)}; config.json asks for {list(into.shape)}")
    if name.endswith("o_proj.bias") and tensor.any():
        raise Z2aError(f"{name} is not zero, and the Z2all decoder has no such bias")
    into.copy_(tensor)


def _weight_files(directory: Path) -> list[Path]:
    if (directory / INDEX).exists():
        names = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    return sorted(directory.glob("*.safetensors"))
