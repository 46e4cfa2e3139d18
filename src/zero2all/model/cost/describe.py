"""``z2a plan --layers``: everything about a recipe's model that follows from its shape, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import yaml

from zero2all.base.errors import UsageError
from zero2all.base.machine.gpu_specs import Gpu
from zero2all.base.units import show_bytes, show_count
from zero2all.model.cost.flops import flops_per_token, palm_flops_per_token
from zero2all.model.cost.model_size import ParameterCounts, count_parameters, kv_cache_bytes_per_token
from zero2all.model.cost.shape_advice import Advice, Matmul, advise_shapes, model_matmuls
from zero2all.model.hf_weights import HFSummary
from zero2all.model.ops import KernelChoice, choose_kernels
from zero2all.recipe import ModelConfig, Recipe


def with_precision_of(recipe: Recipe, gpu: Gpu) -> Recipe:
    """The recipe with the precision that it has on ``gpu``. Precisions that the GPU does not compute are errors."""
    train = recipe.train
    if train.compute_precision == "bf16" and not gpu.has_bf16:
        cause = "train.precision" if train.precision == "bf16" else f"train.optimizer.name={train.optimizer.name}"
        raise UsageError(f"{gpu.name} has no bf16, which {cause} needs: set train.precision=fp16 with adamw")
    if train.float8 is not None and gpu.fp8_flops is None:
        raise UsageError(f"{gpu.name} has no fp8 products: remove train.float8, or use --gpu H100")
    if train.compute_precision != "auto":
        return recipe
    return recipe.model_copy(update={"train": train.model_copy(update={"precision": gpu.auto_precision})})


FLOPS_PARTS = ("projections", "scores", "mlp", "head")
FLOPS_COUNTS = {
    "forward": ("forward", ""),
    "training": ("model", "  forward and backward; what MFU counts"),
    "6N": ("6N", "  6 x active parameters in matrix products; no scores"),
    "PaLM": ("palm", "  6 x all active parameters + scores; what mfu_palm counts"),
    "causal": ("causal", "  training without the pairs that the causal mask excludes"),
    "hardware": ("hardware", "  fused attention recomputes the scores; what HFU counts"),
    "recomputing": ("hardware_recomputing", "  the same with full activation checkpointing"),
}
"""The key of each count by what is printed, and what it means."""


@dataclass(frozen=True)
class KVCacheSize:
    """In bf16, for one token and for one sequence of ``context`` tokens."""

    context: int
    bytes_per_token: int
    bytes: int


@dataclass(frozen=True)
class ModelDescription:
    """The result of ``describe_model``."""

    model: ModelConfig
    parameters: ParameterCounts
    flops_per_token: dict[str, int]
    """FLOPs by what is counted, in a sequence of ``seq_len``."""
    cache: KVCacheSize
    ops: list[KernelChoice]
    gpu: str
    products: list[Matmul]
    advice: list[Advice]


def describe_model(recipe: Recipe, device: torch.device, gpu: Gpu) -> ModelDescription:
    """Ops as they would be chosen on ``device``; shape advice for ``gpu``, which need not be there."""
    config, options = recipe.model, recipe.train
    parameters = count_parameters(config)
    context, per_token = config.max_position_embeddings, kv_cache_bytes_per_token(config)
    return ModelDescription(
        model=config,
        parameters=parameters,
        flops_per_token=_summarize_flops(config, options.seq_len, parameters),
        cache=KVCacheSize(context, per_token, per_token * context),
        ops=_chosen_ops(config, device),
        gpu=gpu.name,
        products=model_matmuls(config, options.effective_micro_batch_tokens, gpu, recipe.parallel.tp),
        advice=advise_shapes(recipe, gpu),
    )


def _summarize_flops(config: ModelConfig, seq_len: int, parameters: ParameterCounts) -> dict[str, int]:
    flops = flops_per_token(config, seq_len)
    return {
        "seq_len": seq_len,
        **{part: getattr(flops, part) for part in FLOPS_PARTS},
        "forward": flops.forward,
        "backward": flops.model - flops.forward,
        "model": flops.model,
        "palm": palm_flops_per_token(config, parameters.active, seq_len),
        "causal": flops.causal,
        "hardware": flops.hardware(),
        "hardware_recomputing": flops.hardware("full"),
        "6N": 6 * parameters.in_products,
    }


def _chosen_ops(config: ModelConfig, device: torch.device) -> list[KernelChoice]:
    """The table of ``device``; a named kernel may need another device, which is reported instead."""
    try:
        table = choose_kernels(config, device).choices
        return [choice for choice in table if config.moe or choice.op != "experts"]
    except UsageError as error:
        return [KernelChoice("not on this machine", "", {"why": str(error)})]


def model_text(shown: ModelDescription) -> str:
    """The same for a person."""
    sections = [_parameters, _flops, _cache, _ops, _shapes]
    return "\n\n".join("\n".join(section(shown)) for section in sections)


def weights_lines(weights: HFSummary, model: ModelConfig) -> list[str]:
    """Whether a Hugging Face directory can be used for ``train.init``, and the section of a recipe for it."""
    if weights.problem is None:
        head = f"weights  {show_bytes(weights.bytes)} in {weights.dtype}, {weights.files} safetensors files"
    else:
        head = f"weights  not usable: {weights.problem}"
    section = {"model": model.model_dump(mode="json", exclude_defaults=True, exclude={"ops"})}
    recipe = yaml.safe_dump(section, sort_keys=False).splitlines()
    return [head, "", f"recipe for train.init: {weights.path}", *(f"  {line}" for line in recipe)]


def _parameters(shown: ModelDescription) -> list[str]:
    counts = shown.parameters
    lines = [f"parameters  {counts.total:,}"]
    if counts.active != counts.total:
        lines[0] += f", {counts.active:,} of them active for a token"
    return lines + [f"  {part:<12}{count:>16,}  {count / counts.total:6.1%}" for part, count in counts.parts.items()]


def _flops(shown: ModelDescription) -> list[str]:
    flops = shown.flops_per_token
    lines = [f"FLOPs per token, in a sequence of {flops['seq_len']}"]
    lines += [f"  {part:<12}{show_count(flops[part]):>9}" for part in FLOPS_PARTS]
    return lines + [f"  {name:<12}{show_count(flops[key]):>9}{what}" for name, (key, what) in FLOPS_COUNTS.items()]


def _cache(shown: ModelDescription) -> list[str]:
    cache = shown.cache
    return [
        f"KV cache  {show_bytes(cache.bytes_per_token)} per token in bf16, "
        f"{show_bytes(cache.bytes)} for one sequence of {cache.context}"
    ]


def _ops(shown: ModelDescription) -> list[str]:
    lines = ["ops"]
    for row in shown.ops:
        others = "; ".join(f"{kernel}: {why}" for kernel, why in row.others.items())
        lines.append(f"  {row.op:<14}{row.form:<10}  {others}")
    return lines


def _shapes(shown: ModelDescription) -> list[str]:
    lines = [f"matrix products on {shown.gpu}, computed"]
    lines += [
        f"  {row.name:<20}{row.rows:>7} x {row.inner:<6} x {row.columns:<7}"
        f"{row.tiles:>6} tiles {row.waves:6.2f} waves, {row.filled:4.0%} filled"
        for row in shown.products
    ]
    advice = [f"  {row}" for row in shown.advice]
    return [*lines, "shape advice", *(advice or ["  none"])]
