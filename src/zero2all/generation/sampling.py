"""From logits to text: which token comes next, and the text of tokens as they arrive.

Temperature, top-k, top-p, min-p and repetition penalty are as transformers defines them.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import AnyStr

import numpy as np
import torch
from torch import Tensor

from zero2all.base.errors import UsageError

GREEDY = 1e-5  # a lower temperature is none: fp32 could not divide by it


@dataclass(frozen=True)
class SamplingParams:
    """How text is generated.

    >>> SamplingParams(max_tokens=300, temperature=0.7, top_k=0, top_p=0.9, stop=("\\n\\n",), seed=1)
    """

    max_tokens: int = 128
    """Maximum number of tokens to generate."""
    temperature: float = 0.8
    """Logits are divided by it; 0 is greedy decoding."""
    top_k: int = 50
    """Sample from the k most likely tokens; 0 samples from all."""
    top_p: float = 1.0
    """Sample from the fewest of the most likely tokens that have this probability together."""
    min_p: float = 0.0
    """Sample from tokens at least this probable, relative to the most likely token."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of the text so far become less likely."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    seed: int = 0
    """A prompt has its own random numbers, from the seed and its tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name, valid, rule in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "a number of at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number above 0"),
            ("stop", all(self.stop), "strings that are not empty"),
        ):
            if not valid:
                raise UsageError(f"{name} must be {rule}; it is {getattr(self, name)!r}")


def choose_tokens(logits_BV: Tensor, params: SamplingParams, uniforms_B: Tensor, seen_BV: Tensor | None) -> Tensor:
    """The next token of each row, [B]. ``uniforms_B`` in [0, 1) decide; ``seen_BV`` marks the tokens to penalize."""
    if seen_BV is not None:
        logits_BV = penalize(logits_BV, params.repetition_penalty, seen_BV)
    if params.temperature < GREEDY:
        return logits_BV.argmax(-1)
    logits_BC, ids_BC = candidates(logits_BV, params)
    # Inverse transform sampling. The first cumulative probability above the number belongs to a token of some
    # probability: tokens without any have the same one as the token before them.
    cumulative_BC = logits_BC.softmax(-1).cumsum(-1)
    targets_B1 = uniforms_B[:, None] * cumulative_BC[:, -1:]
    chosen_B1 = torch.searchsorted(cumulative_BC, targets_B1, right=True)
    chosen_B1 = chosen_B1.clamp(max=logits_BC.shape[1] - 1)  # only NaN gets past the end
    return (chosen_B1 if ids_BC is None else ids_BC.gather(1, chosen_B1))[:, 0]


def penalize(logits_BV: Tensor, penalty: float, seen_BV: Tensor) -> Tensor:
    """https://arxiv.org/abs/1909.05858, with negative logits multiplied."""
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def candidates(logits_BV: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Logits over the temperature, up to a constant a row, of the C likeliest tokens and their ids, None for all of V.

    Logits are -inf where a filter excludes a token.
    """
    ids_BC = None
    if 0 < params.top_k < logits_BV.shape[1] or params.top_p < 1:
        logits_BV, ids_BC = _largest(logits_BV, min(params.top_k or logits_BV.shape[1], logits_BV.shape[1]))
    # The largest becomes 0, so that no temperature overflows.
    scaled_BC = (logits_BV - logits_BV.amax(-1, keepdim=True)) / params.temperature
    if params.top_p < 1:
        probs_BC = scaled_BC.softmax(-1)
        scaled_BC = scaled_BC.masked_fill(probs_BC.cumsum(-1) - probs_BC >= params.top_p, -math.inf)
    if params.min_p > 0:
        scaled_BC = scaled_BC.masked_fill(scaled_BC < math.log(params.min_p), -math.inf)
    return scaled_BC, ids_BC


def _largest(values_BV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest values of each row in descending order, and where they are."""
    if values_BV.device.type != "cpu":
        values_BC, ids_BC = values_BV.topk(count)
        return values_BC, ids_BC
    # Numpy's vectorized sorting: on a CPU torch takes several times as long.
    array = values_BV.numpy()
    ids = np.argpartition(array, -count)[:, -count:]
    ids = np.take_along_axis(ids, np.argsort(-np.take_along_axis(array, ids, 1)), 1)
    return values_BV.gather(1, torch.from_numpy(ids)), torch.from_numpy(ids)


class TextStream:
    """The text of tokens as they arrive. What may still change is held back: the bytes of an incomplete character,
    and what may become a stop string.

    >>> stream = TextStream(tokenizer.token_bytes, stop=["\\n\\n"])
    >>> [stream.push([id]) for id in tokenizer.encode("一\\n\\n二")], stream.stopped
    (['', '一', ''], True)
    """

    def __init__(self, token_bytes: Sequence[bytes], stop: Iterable[str] = ()) -> None:
        self._token_bytes = token_bytes
        # Bytes match where text does: UTF-8 has no character inside another.
        self._stops = [text.encode("utf-8", "surrogatepass") for text in stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self.stopped = False

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is certain now. At a stop string ``stopped`` is set, and this is the rest before it."""
        self._held += b"".join([self._token_bytes[token] for token in tokens])
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            self._held = self._held[: min(places)]
            return self.finish()
        split = len(self._held) - max((overlap(self._held, stop) for stop in self._stops), default=0)
        certain, self._held = self._held[:split], self._held[split:]
        return self._decoder.decode(certain)

    def finish(self) -> str:
        """The rest, with U+FFFD for an incomplete character."""
        rest, self._held = self._held, b""
        return self._decoder.decode(rest, final=True)


def overlap(text: AnyStr, stop: AnyStr) -> int:
    """How many of the last bytes or characters are the beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
