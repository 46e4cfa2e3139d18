"""The sampler computes in the trainer's precision, in every layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.ranks import on_ranks
from zero2all.generation import SamplingParams, generate_batch
from zero2all.parallel import ParallelDims, ParallelMesh, ParallelModel
from zero2all.recipe import ModelConfig, ParallelRecipe
from zero2all.tokenizer import Tokenizer

CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2,
    "residual_fp32": False,  # else autocast adds embeddings in fp32, and FSDP has gathered them in bf16
}  # fmt: skip
PROMPTS = ["the model", "a b c", "春眠不觉晓", "the the", "once upon", "in a", "of all", "x"]
PARAMS = SamplingParams(max_tokens=16, temperature=1.0, top_k=0, seed=4)
LAYOUTS: list[dict[str, Any]] = [{"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2, "schedule": "1f1b"}]
DTYPES = (torch.bfloat16, torch.float32)
DDP, FSDP = 0, 1
WIDTH = 49  # sequence parallelism divides the inputs
BF16_RATIO, FP32_GAP = 1.5, 1e-5


class Measured(NamedTuple):
    """Mean differences of log-probabilities, and what was sampled."""

    gap: float
    """Between sampler and trainer."""
    noise: float
    """Between two forward passes of the trainer: all rows, and rows of one token more or less each."""
    tokens: list[list[int]]


def trainer_losses(model: ParallelModel, rows: Tensor) -> Tensor:
    """The losses of the trainer's forward pass, on every rank."""
    losses = model.eval_losses(rows[:, :-1], rows[:, 1:])
    return model.all_reduce_sum(losses) / model.mesh.dims.dp


def measure(sizes: dict[str, Any], world: int, dtype: torch.dtype, directory: Path) -> Measured:
    tokenizer, recipe = Tokenizer(directory), ParallelRecipe(**sizes)
    mesh = ParallelMesh(ParallelDims.from_recipe(recipe, world), torch.device("cpu"))
    config = ModelConfig.model_validate({**CONFIG, "vocab_size": tokenizer.vocab_size})
    model = ParallelModel(config, recipe, mesh, seed=0, dtype=dtype)
    completions = generate_batch(model, tokenizer, PROMPTS, PARAMS)
    texts = [torch.tensor(one.prompt_tokens + one.tokens) for one in completions]
    rows = torch.stack([torch.nn.functional.pad(text, (0, WIDTH - len(text))) for text in texts])
    together = trainer_losses(model, rows)
    gaps, noise = [], []
    for row, own, one in zip(rows, together, completions, strict=True):
        places = len(one.prompt_tokens) - 1 + torch.arange(len(one.tokens))
        gaps.append((torch.tensor(one.logprobs) + own[places]).abs())
        shorter: dict[int, Tensor] = {}  # the losses of a row that ends there: two places share an even length
        for place in places.tolist() if dtype == torch.bfloat16 else ():  # at the end of a row of its own
            even = (place + 2) // 2 * 2
            if even not in shorter:
                shorter[even] = trainer_losses(model, row[None, : even + 1])[0]
            noise.append((shorter[even][place] - own[place]).abs())
    own_noise = torch.stack(noise).mean().item() if noise else 0.0
    return Measured(torch.cat(gaps).mean().item(), own_noise, [one.tokens for one in completions])


def measure_layouts(world: int, layouts: list[dict[str, Any]], directory: Path) -> list[list[Measured]]:
    return [[measure(sizes, world, dtype, directory) for sizes in layouts] for dtype in DTYPES]


def test_sampler_and_trainer_agree_in_every_layout(workspace: Path) -> None:
    directory = workspace / "tokenizer"
    alone = measure_layouts(1, [{}], directory)
    found = on_ranks(2, measure_layouts, 2, LAYOUTS, directory, detail=False)[0]
    for dtype, one, several in zip(DTYPES, alone, found, strict=True):
        for sizes, measured in zip([{}, *LAYOUTS], [*one, *several], strict=True):
            text = f"{dtype} {sizes}: sampler to trainer {measured.gap:.2g}, two passes {measured.noise:.2g}"
            sys.stdout.write(f"{text}\n")
            assert measured.gap <= (FP32_GAP if dtype == torch.float32 else BF16_RATIO * measured.noise), text
        assert several[DDP].tokens == several[FSDP].tokens == one[0].tokens
