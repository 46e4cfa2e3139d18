"""Shape advice: which sizes waste GPU compute, and what to write instead. Computed; no GPU is needed.

Two effects (https://arxiv.org/abs/2401.14489): a dimension that is no multiple of what a tensor core loads at once is
slow in every product it takes part in, and a product whose output tiles do not fill the last round over the
multiprocessors ("wave") waits for it. ``z2a bench shapes`` measures instead of estimating.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zero2all.base.machine.gpu_specs import Gpu
from zero2all.recipe import ModelConfig, Recipe

TILE = (128, 256)  # output elements of one thread block in the large kernels of cuBLAS and CUTLASS
MIN_UTILIZATION = 0.85  # a product that uses less of the multiprocessors than this gets advice
MAX_SIZE_CHANGE = 0.05  # how far another size may be and still be the same model


@dataclass(frozen=True)
class Advice:
    """One field of the recipe that could be better, and why."""

    field: str
    value: int
    better: int
    why: str

    def __str__(self) -> str:
        return f"{self.field}={self.value} -> {self.better}: {self.why}"


@dataclass(frozen=True)
class Matmul:
    """A matrix product [rows, inner] x [inner, columns] of the forward pass, and how well its output fills a GPU."""

    name: str
    rows: int
    inner: int
    columns: int
    tiles: int
    waves: float
    filled: float
    """Useful share of the multiprocessors' time: 1 if full tiles fill full waves."""


def model_matmuls(config: ModelConfig, tokens: int, gpu: Gpu, tp: int = 1) -> list[Matmul]:
    """The large products of one micro-batch on one GPU, with each matrix sharded over ``tp`` of them."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_size // tp
    keys = config.num_key_value_heads * config.head_size // tp
    _, wide, rows = _feed_forward(config, tokens)
    shapes = {
        "q_proj": (tokens, hidden, heads),
        "k_proj, v_proj": (tokens, hidden, keys),
        "o_proj": (tokens, heads, hidden),
        "gate_proj, up_proj": (rows, hidden, wide // tp),
        "down_proj": (rows, wide // tp, hidden),
        "lm_head": (tokens, hidden, config.padded_vocab_size // tp),
    }
    return [_matmul(name, *shape, gpu) for name, shape in shapes.items()]


def _feed_forward(config: ModelConfig, tokens: int) -> tuple[str, int, int]:
    """The field that sets its width, the width, and the rows of its products: an expert sees its share of tokens."""
    if config.moe is None:
        return "model.intermediate_size", config.intermediate_size, tokens
    share = tokens * config.moe.num_experts_per_tok // config.moe.num_experts
    return "model.moe.moe_intermediate_size", config.moe.moe_intermediate_size, share


def _matmul(name: str, rows: int, inner: int, columns: int, gpu: Gpu) -> Matmul:
    """With the tile lying the way that fills the GPU better, as a library would choose."""
    choices = []
    for high, wide in (TILE, TILE[::-1]):
        tiles = -(-rows // high) * -(-columns // wide)
        rounds = -(-tiles // gpu.sms)
        choices.append((rows * columns / (rounds * gpu.sms * high * wide), tiles))
    filled, tiles = max(choices)
    return Matmul(name, rows, inner, columns, tiles, tiles / gpu.sms, filled)


def advise_shapes(recipe: Recipe, gpu: Gpu) -> list[Advice]:
    """Everything in the recipe's shape that the GPU would not like.

    >>> from zero2all.base.machine.gpu_specs import GPUS
    >>> train = TrainRecipe(epochs=1, batch_tokens=16384)
    >>> recipe = Recipe(model=ModelConfig(intermediate_size=500, vocab_size=8192), train=train)
    >>> print(advise_shapes(recipe, GPUS["A100"])[0])
    model.intermediate_size=500 -> 512: not a multiple of 64 elements, so A100 does not use its tensor cores fully
    """
    return [*_alignment_advice(recipe, gpu), *_wave_quantization_advice(recipe, gpu)]


def _alignment_advice(recipe: Recipe, gpu: Gpu) -> Iterator[Advice]:
    config, tp = recipe.model, recipe.parallel.tp
    each = f" on each of {tp} GPUs" if tp > 1 else ""
    why = f"not a multiple of {gpu.align} elements{each}, so {gpu.name} does not use its tensor cores fully"
    wide_field, wide, _ = _feed_forward(config, recipe.train.effective_micro_batch_tokens)
    for field, value, parts in (
        ("model.hidden_size", config.hidden_size, 1),
        (wide_field, wide, tp),
        ("train.micro_batch_tokens", recipe.train.effective_micro_batch_tokens, 1),
    ):
        if value % (gpu.align * parts):
            yield Advice(field, value, _round_up(value, gpu.align * parts), why)
    if config.padded_vocab_size % (64 * tp):  # one device's rows are padded to 64 already
        better = _round_up(config.padded_vocab_size, 64 * tp)
        yield Advice("model.vocab_size", config.padded_vocab_size, better, f"not a multiple of 64 rows{each}")
    if config.head_size not in (64, 128):
        better = min((64, 128), key=lambda size: abs(size - config.head_size))
        why = (
            "attention kernels are written for heads of 64 and 128; with flash attention only the size of a head "
            "counts, which must be large enough, so fewer, larger heads cost less for the same width"
        )
        if config.head_dim is None and config.hidden_size % better == 0:
            yield Advice("model.num_attention_heads", config.num_attention_heads, config.hidden_size // better, why)
        else:
            yield Advice("model.head_dim", config.head_size, better, why)
    if tp > 1 and config.num_key_value_heads % tp:
        yield Advice(
            "model.num_key_value_heads",
            config.num_key_value_heads,
            _round_up(config.num_key_value_heads, tp),
            f"tp={tp} cannot split it evenly",
        )


def _wave_quantization_advice(recipe: Recipe, gpu: Gpu) -> Iterator[Advice]:
    config, tokens, tp = recipe.model, recipe.train.effective_micro_batch_tokens, recipe.parallel.tp
    field, wide, rows = _feed_forward(config, tokens)
    step = max(64, gpu.align) * tp

    def filled(size: int) -> float:
        return _matmul("", rows, config.hidden_size, size // tp, gpu).filled

    if wide % step == 0 and filled(wide) < MIN_UTILIZATION:
        reach = int(wide * MAX_SIZE_CHANGE) // step * step
        nearby = range(wide - reach, wide + reach + step, step)
        best = max(nearby, key=lambda size: (round(filled(size), 2), -abs(size - wide)))
        if filled(best) > filled(wide) + 0.03:
            busy = f"{filled(best):.0%} of {gpu.name}'s {gpu.sms} multiprocessors busy instead of {filled(wide):.0%}"
            yield Advice(field, wide, best, f"gate and up would keep {busy}")
    narrow = min(
        (
            product
            for product in model_matmuls(config, tokens, gpu, tp)
            if product.name in ("gate_proj, up_proj", "down_proj")
        ),
        key=lambda product: product.waves,
    )
    if narrow.waves < 1:
        better = _round_up(int(tokens / narrow.waves), recipe.train.seq_len)
        why = (
            f"{narrow.name} has {narrow.tiles} output tiles for {gpu.sms} multiprocessors of {gpu.name}: the rest idle"
        )
        yield Advice("train.micro_batch_tokens", tokens, better, why)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
