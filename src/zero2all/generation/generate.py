"""Autoregressive sampling with a KV cache."""

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

    Temperature 0 is greedy decoding. Of the special tokens only stop tokens are ever sampled.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    # In training a document follows an end-of-text token, so a prompt does too.
    # A prompt that does not fit beside the answer loses its beginning.
    context = model.config.max_position_embeddings
    max_prompt_tokens = context - min(max_tokens, context // 2)
    ids = [tokenizer.eos_token_id, *tokenizer.encode(prompt)][-max_prompt_tokens:]
    length = min(len(ids) + max_tokens, context)
    cache = KVCache(model.config, batch=1, length=length, device=device, dtype=model.embed_tokens.weight.dtype)
    end_ids = set(tokenizer.stop_token_ids)
    forbidden_ids = torch.tensor(sorted(set(tokenizer.special_ids.values()) - end_ids), dtype=torch.long, device=device)
    out: list[int] = []
    next_input = torch.tensor([ids], device=device)
    while len(ids) + len(out) < length:
        logits = model(next_input, cache=cache)[0, -1, : tokenizer.vocab_size].float()
        token = _sample_token(logits.index_fill(0, forbidden_ids, -torch.inf), temperature, top_k, generator)
        if token in end_ids:
            break
        out.append(token)
        next_input = torch.tensor([[token]], device=device)
    return tokenizer.decode(out)


def _sample_token(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits_V.argmax())
    top_logits, ids = logits_V.topk(min(top_k, len(logits_V)) if top_k > 0 else len(logits_V))
    choice = torch.multinomial(torch.softmax(top_logits / temperature, dim=-1), 1, generator=generator)
    return int(ids[choice])
