"""The weights of a Hugging Face directory, under our names.

The names are ours behind ``model.``, with one tensor for each expert. One mapping serves export and import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero2all.errors import UsageError, Z2aError
from zero2all.io import MANIFEST, read_json, read_record, sha256_file
from zero2all.model.hf_config import from_hf_config
from zero2all.model.lora import ADAPTER_MARK
from zero2all.model.weights import part_slices
from zero2all.model.z2all import Z2all
from zero2all.recipe import ModelConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that older versions of transformers stored


@dataclass(frozen=True)
class HFIndex:
    """``model.safetensors.index.json``."""

    weight_map: dict[str, str]
    """The file of each tensor."""


@dataclass(frozen=True)
class HFSummary:
    """What ``z2a model show`` says of the weights of a Hugging Face directory."""

    path: str
    dtype: str
    files: int
    bytes: int
    problem: str | None
    """Why ``train.init`` cannot use them."""


def hf_names(name: str, config: ModelConfig) -> list[str]:
    """What a weight of ours is stored as: one tensor, or one for each expert. A tied head, MTP and adapters are not
    stored."""
    if name.startswith("mtp.") or ADAPTER_MARK in name or (name == "lm_head.weight" and config.tie_word_embeddings):
        return []
    if config.moe is not None and _is_of_experts(name):
        prefix, _, matrix = name.rpartition(".")
        return [f"model.{prefix}.{number}.{matrix}.weight" for number in range(config.moe.num_experts)]
    return [name if name == "lm_head.weight" else f"model.{name}"]


def _is_of_experts(name: str) -> bool:
    return ".experts." in name


def hf_weights(model: Z2all) -> dict[str, Tensor]:
    """Our weights under their Hugging Face names, as views."""
    config, weights = model.config, dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        names = hf_names(name, config)
        if _is_of_experts(name):
            weights |= zip(names, tensor, strict=True)
        elif names:
            weights[names[0]] = tensor[: config.vocab_size] if name.startswith(("embed_tokens", "lm_head")) else tensor
    return weights | {name: torch.zeros(config.hidden_size) for name in _zero_biases(config)}


def _zero_biases(config: ModelConfig) -> list[str]:
    """Qwen3 switches the biases of q, k, v and o together; ours has none on o, which is a zero one."""
    if not (config.qkv_bias and config.qk_norm):
        return []
    return [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(config.num_hidden_layers)]


def read_hf_config(directory: Path) -> ModelConfig:
    path = directory / CONFIG
    if not path.exists():
        raise UsageError(f"no Hugging Face model in {directory}: {CONFIG} is missing")
    return from_hf_config(read_json(path), path)


class HFWeights:
    """The weights of a Hugging Face directory. Only safetensors files are read: a pickle file can run code.

    Names, shapes and dtypes are checked here, from the headers of the files; nothing else is read yet.

    >>> weights = HFWeights(Path("Qwen3-0.6B"))
    >>> weights.config.hidden_size, weights.dtype
    (1024, 'bfloat16')
    """

    def __init__(self, directory: Path) -> None:
        self.path, self.config = directory, read_hf_config(directory)
        self.files = _weight_files(directory)
        self._tensors = _open_tensors(self.files, self.config)
        self._check_shapes()
        self.dtype = ", ".join(sorted({self._dtype(name) for name in self._tensors}))

    def shape(self, name: str) -> tuple[int, ...] | None:
        names = hf_names(name, self.config)
        if not names or names[0] not in self._tensors:
            return None
        shape = tuple(self._tensors[names[0]].get_shape())
        return (len(names), *shape) if _is_of_experts(name) else shape

    def read(self, name: str, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        names, part = hf_names(name, self.config), part_slices(begin, size)
        if _is_of_experts(name):
            return torch.stack([self._tensors[expert][part[1:]] for expert in names[part[0]]])
        values: Tensor = self._tensors[names[0]][part]
        return values

    def checksums(self, rank: int, world_size: int) -> dict[str, str]:
        recorded = _recorded_checksums(self.path)
        digests = {}
        for path in [self.path / CONFIG, *self.files][rank::world_size]:
            digests[path.name] = sha256_file(path)
            if recorded.get(path.name, digests[path.name]) != digests[path.name]:
                raise Z2aError(f"{path} does not match its checksum in {MANIFEST}: copy or export it again")
        return digests

    def _check_shapes(self) -> None:
        with torch.device("meta"):
            wanted = {name: tuple(weight.shape) for name, weight in hf_weights(Z2all(self.config)).items()}
        for name in self._tensors:
            self._dtype(name)  # first: quantized weights have tensors of their own
            if name not in wanted:
                raise Z2aError(f"{self.path} holds {name}, which {CONFIG} says nothing of")
            if (shape := tuple(self._tensors[name].get_shape())) != wanted[name]:
                raise Z2aError(f"{self.path}: {name} has shape {list(shape)}; {CONFIG} asks for {list(wanted[name])}")
        if missing := wanted.keys() - self._tensors.keys():
            raise Z2aError(f"{self.path} lacks {len(missing)} weights, such as {min(missing)}")
        for name in _zero_biases(self.config):
            if self._tensors[name][:].any():
                raise Z2aError(f"{self.path}: {name} is not zero, and the Z2all decoder has no such bias")

    def _dtype(self, name: str) -> str:
        stored = self._tensors[name].get_dtype()
        if stored not in DTYPES:
            raise Z2aError(
                f"{self.path}: {name} is stored as {stored}; quantized weights cannot be trained: get them in "
                f"{', '.join(DTYPES.values())}"
            )
        return DTYPES[stored]


def _open_tensors(files: Sequence[Path], config: ModelConfig) -> Mapping[str, Any]:
    """A handle of each tensor that the model has. Its values are read from the file when it is indexed."""
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for path in files:
        try:
            file: Any = safe_open(str(path), framework="pt")
            names = [name for name in file.keys() if not name.endswith(UNUSED_SUFFIX)]  # noqa: SIM118 - not a dict
            if config.tie_word_embeddings:
                names = [name for name in names if name != "lm_head.weight"]  # a second copy of the embedding
            for name in names:
                if name in tensors:
                    raise Z2aError(f"{path} holds {name}, which another file holds as well: keep one of them")
                tensors[name] = file.get_slice(name)
        except FileNotFoundError:
            raise Z2aError(f"{path} is missing: get the files of the model again") from None
        except SafetensorError as error:
            raise Z2aError(f"{path} is damaged or not a safetensors file ({error}): get it again") from error
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    if (directory / INDEX).exists():
        names = sorted(set(read_record(HFIndex, directory / INDEX).weight_map.values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise Z2aError(f"{directory / INDEX} names {name!r}, which is no safetensors file in {directory}")
        return [directory / name for name in names]
    if files := sorted(directory.glob("*.safetensors")):
        return files
    if pickles := sorted(path.name for pattern in PICKLE_PATTERNS for path in directory.glob(pattern)):
        raise UsageError(
            f"{directory} has its weights only as a pickle file ({pickles[0]}), which can run code and is not read: "
            "get them as safetensors, or convert them where you trust them ('save_pretrained' of transformers)"
        )
    raise UsageError(f"no weights in {directory}: {WEIGHTS} or {INDEX} is missing")


def _recorded_checksums(directory: Path) -> dict[str, str]:
    """What ``z2a export`` recorded; empty for a directory from elsewhere."""
    manifest = read_json(directory / MANIFEST) if (directory / MANIFEST).exists() else None
    if not isinstance(manifest, dict) or manifest.get("kind") != "export":
        return {}
    recorded = manifest.get("files")
    return recorded if isinstance(recorded, dict) else {}


def summarize_hf(directory: Path) -> HFSummary:
    try:
        weights = HFWeights(directory)
    except Z2aError as error:
        return HFSummary(str(directory), "", 0, 0, str(error))
    size = sum(path.stat().st_size for path in weights.files)
    return HFSummary(str(directory), weights.dtype, len(weights.files), size, None)
