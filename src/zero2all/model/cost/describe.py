"""``z2a model show``: everything about a recipe's model that follows from its shape, as data and as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from zero2all.errors import UsageError
from zero2all.hardware import Gpu, compute_dtype, dtype_name
from zero2all.model.cost.flops import flops_per_token
from zero2all.model.cost.model_size import count_parameters, kv_cache_bytes_per_token, training_memory
from zero2all.model.cost.shape_advice import advise_shapes, model_matmuls
from zero2all.model.ops import choose_kernels
from zero2all.recipe import ModelConfig, Recipe
from zero2all.units import show_bytes, show_count


def describe_model(recipe: Recipe, device: torch.device, gpu: Gpu) -> dict[str, Any]:
    """Ops as they would be chosen on ``device``; shape advice for ``gpu``, which need not be there."""
    config, options = recipe.model, recipe.train
    parameters = count_parameters(config)
    flops = flops_per_token(config, options.seq_len)
    per_token = kv_cache_bytes_per_token(config)
    return {
        "model": config.model_dump(mode="json"),
        "parameters": asdict(parameters),
        "flops_per_token": {
            "seq_len": options.seq_len,
            **{name: getattr(flops, name) for name in ("projections", "scores", "mlp", "head", "forward")},
            "backward": flops.model - flops.forward,
            "model": flops.model,
            "causal": flops.causal,
            "hardware": flops.hardware(),
            "hardware_recomputing": flops.hardware("full"),
            "6N": 6 * parameters.in_products,
        },
        "cache": {
            "context": config.max_position_embeddings,
            "bytes_per_token": per_token,
            "bytes": per_token * config.max_position_embeddings,
        },
        "training_memory": {
            "micro_batch_tokens": options.effective_micro_batch_tokens,
            "precision": dtype_name(compute_dtype(options.precision, device)),
            **asdict(training_memory(recipe, device)),
        },
        "ops": _chosen_ops(config, device, options.deterministic),
        "gpu": gpu.name,
        "products": [
            asdict(product)
            for product in model_matmuls(config, options.effective_micro_batch_tokens, gpu, recipe.parallel.tp)
        ],
        "advice": [asdict(advice) for advice in advise_shapes(recipe, gpu)],
    }


def _chosen_ops(config: ModelConfig, device: torch.device, deterministic: bool) -> list[dict[str, Any]]:
    """The table of ``device``; a named kernel may need another device, which is reported instead."""
    try:
        table = choose_kernels(config, device, deterministic).choices
        return [asdict(choice) for choice in table if config.moe or choice.op != "experts"]
    except UsageError as error:
        return [{"op": "not on this machine", "form": "", "others": {"why": str(error)}}]


def model_text(shown: dict[str, Any]) -> str:
    """The same for a person."""
    sections = (_parameters, _flops, _memory, _ops, _shapes)
    return "\n\n".join("\n".join(section(shown)) for section in sections)


def _parameters(shown: dict[str, Any]) -> list[str]:
    counts = shown["parameters"]
    lines = [f"parameters  {counts['total']:,}"]
    if counts["active"] != counts["total"]:
        lines[0] += f", {counts['active']:,} of them active for a token"
    return lines + [
        f"  {part:<12}{count:>16,}  {count / counts['total']:6.1%}" for part, count in counts["parts"].items()
    ]


def _flops(shown: dict[str, Any]) -> list[str]:
    flops = shown["flops_per_token"]
    head = f"FLOPs per token, in a sequence of {flops['seq_len']}"
    parts = [f"  {part:<12}{show_count(flops[part]):>9}" for part in ("projections", "scores", "mlp", "head")]
    return [
        head,
        *parts,
        f"  forward     {show_count(flops['forward']):>9}",
        f"  training    {show_count(flops['model']):>9}  forward and backward; what MFU counts",
        f"  6N          {show_count(flops['6N']):>9}  6 x active parameters in matrix products; no scores",
        f"  causal      {show_count(flops['causal']):>9}  training without the pairs that the causal mask leaves out",
        f"  hardware    {show_count(flops['hardware']):>9}  with fused attention, whose backward computes scores again",
        f"  recomputing {show_count(flops['hardware_recomputing']):>9}  with activation checkpointing besides; HFU",
    ]


def _memory(shown: dict[str, Any]) -> list[str]:
    cache, memory = shown["cache"], shown["training_memory"]
    parts = {
        "weights": "",
        "gradients": "",
        "optimizer": "",
        "half_weights": "copies of the matrices under autocast",
        "activations": "estimate: kept for the backward by the fused kernels, eager",
        "activations_recomputing": "estimate: in their place with activation checkpointing",
        "logits": "estimate: only where the loss keeps all logits, as its reference does",
    }
    return [
        f"KV cache  {show_bytes(cache['bytes_per_token'])} a token in bf16, "
        f"{show_bytes(cache['bytes'])} for one sequence of {cache['context']}",
        "",
        f"training memory on one device, {memory['micro_batch_tokens']} tokens at a time in {memory['precision']}",
        *(f"  {name.replace('_', ' '):<24}{show_bytes(memory[name]):>9}  {note}" for name, note in parts.items()),
    ]


def _ops(shown: dict[str, Any]) -> list[str]:
    lines = ["ops"]
    for row in shown["ops"]:
        others = "; ".join(f"{kernel}: {why}" for kernel, why in row["others"].items())
        lines.append(f"  {row['op']:<14}{row['form']:<10}  {others}")
    return lines


def _shapes(shown: dict[str, Any]) -> list[str]:
    lines = [f"matrix products on {shown['gpu']}, on paper"]
    lines += [
        f"  {row['name']:<20}{row['rows']:>7} x {row['inner']:<6} x {row['columns']:<7}"
        f"{row['tiles']:>6} tiles {row['waves']:6.2f} waves, {row['filled']:4.0%} filled"
        for row in shown["products"]
    ]
    advice = [f"  {row['field']}={row['value']} -> {row['better']}: {row['why']}" for row in shown["advice"]]
    return [*lines, "shape advice", *(advice or ["  none: these sizes suit it"])]
