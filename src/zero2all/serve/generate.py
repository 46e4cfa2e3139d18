"""Sampling from a model, one position at a time over a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from zero2all.model import KVCache, Z2all
from zero2all.tokenizer import Tokenizer


@torch.inference_mode()
def generate(
    model: Z2all,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """The continuation of ``prompt``, up to the end of the document or message.

    Temperature 0 always takes the likeliest token. Of the special tokens only those that end a text are ever taken.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    # A document starts after the end of another, so that is how a prompt starts too.
    # One that does not fit beside the answer loses its beginning.
    room = model.config.context - min(max_tokens, model.config.context // 2)
    ids = [tokenizer.end_of_text, *tokenizer.encode(prompt)][-room:]
    length = min(len(ids) + max_tokens, model.config.context)
    cache = KVCache(model.config, batch=1, length=length, device=device, dtype=model.embed_tokens.weight.dtype)
    ends = set(tokenizer.end_ids)
    never = torch.tensor(sorted(set(tokenizer.special_ids.values()) - ends), dtype=torch.long, device=device)
    out: list[int] = []
    next_input = torch.tensor([ids], device=device)
    while len(ids) + len(out) < length:
        logits = model(next_input, cache=cache)[0, -1, : tokenizer.vocab_size].float()
        token = _pick(logits.index_fill(0, never, -torch.inf), temperature, top_k, generator)
        if token in ends:
            break
        out.append(token)
        next_input = torch.tensor([[token]], device=device)
    return tokenizer.decode(out)


def _pick(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits_V.argmax())
    best, ids = logits_V.topk(min(top_k, len(logits_V)) if top_k > 0 else len(logits_V))
    choice = torch.multinomial(torch.softmax(best / temperature, dim=-1), 1, generator=generator)
    return int(ids[choice])
