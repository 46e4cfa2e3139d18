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

from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import MANIFEST, check_regular, read_json, read_json_object, read_record, sha256_file
from zero2all.model.hf_config import from_hf_config, hf_model_type
from zero2all.model.lora import ADAPTER_MARK
from zero2all.model.weights import VOCABULARY_WEIGHTS, WeightReader, part_slices
from zero2all.model.z2all import Z2all
from zero2all.recipe import ModelConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EXPERT_BIAS, HF_EXPERT_BIAS = ".mlp.bias", ".mlp.gate.e_score_correction_bias"
UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that older versions of transformers stored


@dataclass(frozen=True)
class HFIndex:
    """``model.safetensors.index.json``."""

    weight_map: dict[str, str]
    """The file of each tensor."""


@dataclass(frozen=True)
class HFSummary:
    """What ``z2a plan`` says of the weights of a Hugging Face directory."""

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
    if name.endswith(EXPERT_BIAS):
        return [f"model.{name.removesuffix(EXPERT_BIAS)}{HF_EXPERT_BIAS}"]
    return [name if name == "lm_head.weight" else f"model.{name}"]


def _is_of_experts(name: str) -> bool:
    return ".experts." in name


@dataclass(frozen=True)
class HFTensor:
    """A tensor of an export, and where its values come from."""

    name: str
    shape: tuple[int, ...]
    weight: str | None
    """The weight of ours. None: zeros, for what other models have and ours does not."""
    expert: int | None = None
    is_copy: bool = False
    """Whether it copies another tensor; safetensors refuses two that share memory."""

    @property
    def in_fp32(self) -> bool:
        """Whether its precision is kept: the bias of experts decides between near ties."""
        return self.name.endswith(HF_EXPERT_BIAS)

    def read(self, weights: WeightReader) -> Tensor:
        if self.weight is None:
            return torch.zeros(self.shape)
        if self.expert is None:
            values = weights.read(self.weight, (0,) * len(self.shape), self.shape)
            return values.clone() if self.is_copy else values
        return weights.read(self.weight, (self.expert, 0, 0), (1, *self.shape))[0]


def hf_tensors(config: ModelConfig) -> list[HFTensor]:
    """All tensors of a Hugging Face directory of this model, in the order of its layers."""
    with torch.device("meta"):
        weights = Z2all(config).state_dict()
    found = []
    for name, weight in weights.items():
        names = hf_names(name, config)
        if _is_of_experts(name):
            found += [HFTensor(hf, tuple(weight.shape[1:]), name, number) for number, hf in enumerate(names)]
        elif names:
            rows = config.vocab_size if name in VOCABULARY_WEIGHTS and config.vocab_size else len(weight)
            found.append(HFTensor(names[0], (rows, *weight.shape[1:]), name))
    return found + [HFTensor(name, shape, None) for name, shape in zero_tensors(config).items()]


def tied_head(config: ModelConfig) -> list[HFTensor]:
    """A second copy of the embedding, where programs do not share it: GLM-4-MoE in vLLM. ``HFWeights`` skips it."""
    if not config.tie_word_embeddings or hf_model_type(config) != "glm4_moe" or config.vocab_size is None:
        return []
    return [HFTensor("lm_head.weight", (config.vocab_size, config.hidden_size), "embed_tokens.weight", is_copy=True)]


def zero_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of weights that an architecture has and our model does not, which is the same as zeros."""
    kind, layers = hf_model_type(config), range(config.num_hidden_layers)
    if kind == "qwen3" and config.qkv_bias:  # it switches the biases of q, k, v and o together; ours has none on o
        return {f"model.layers.{layer}.self_attn.o_proj.bias": (config.hidden_size,) for layer in layers}
    if kind == "glm4_moe" and config.moe is not None and config.moe.load_balancing != "bias":
        return {
            f"model.layers.{layer}{HF_EXPERT_BIAS}": (config.moe.num_experts,)
            for layer in layers
            if config.is_moe_layer(layer)
        }
    return {}


def read_hf_config(directory: Path) -> ModelConfig:
    path = directory / CONFIG
    if not path.exists():
        raise UsageError(f"no Hugging Face model in {directory}: {CONFIG} is missing")
    return from_hf_config(read_json_object(path), path)


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
        self._check_counts()
        wanted = {tensor.name: tensor.shape for tensor in hf_tensors(self.config)}
        for name in self._tensors:
            self._dtype(name)  # first: quantized weights have tensors of their own
            if name not in wanted:
                raise Z2aError(f"{self.path} holds {name}, which {CONFIG} says nothing of")
            if (shape := tuple(self._tensors[name].get_shape())) != wanted[name]:
                raise Z2aError(f"{self.path}: {name} has shape {list(shape)}; {CONFIG} asks for {list(wanted[name])}")
        if missing := wanted.keys() - self._tensors.keys():
            raise Z2aError(f"{self.path} lacks {len(missing)} weights, such as {min(missing)}")
        for name in zero_tensors(self.config):
            if self._tensors[name][:].any():
                raise Z2aError(f"{self.path}: {name} is not zero, and the Z2all decoder has no such bias")

    def _check_counts(self) -> None:
        """Before a model is built of the config, which may ask for thousands of layers: each has a tensor here."""
        config, held = self.config, len(self._tensors)
        asked = {"layers": config.num_hidden_layers, "experts": config.moe.num_experts if config.moe else 0}
        for what, count in asked.items():
            if count > held:
                raise Z2aError(
                    f"{self.path} lacks weights: {CONFIG} asks for {count} {what}, and it holds {held} tensors"
                )

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
            check_regular(path)
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
