"""Text for prompts, all at once or as it is generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from zero2all.base.errors import UsageError
from zero2all.generation.decoder import REFILL_SHARE, Completion, Decoder, DecoderSize, GenerationRequest, TextPiece
from zero2all.generation.rank_model import LocalModel, RankModel, as_rank_model
from zero2all.generation.sampling import SamplingParams
from zero2all.model import Z2all
from zero2all.model.kv_cache import DECODE_ROWS
from zero2all.parallel import ParallelModel
from zero2all.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, which begins a document, or tokens, such as a rendered chat."""
DEFAULT_PARAMS = SamplingParams()


def generate_batch(
    model: Z2all | ParallelModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    params: SamplingParams = DEFAULT_PARAMS,
    batch_size: int = DECODE_ROWS,
    on_step: Callable[[], None] | None = None,
    occurrences: Sequence[int] | None = None,
) -> list[Completion]:
    """A completion of each prompt, in their order, up to the end of the document or message.

    >>> stories = generate_batch(model, tokenizer, ["Once upon a time"] * 8, SamplingParams(max_tokens=300))
    >>> stories[0].text, stories[0].finish_reason

    ``batch_size`` prompts are decoded at a time; each needs memory for a KV cache of its longest possible text. A
    completion depends on its prompt, the parameters and how many earlier prompts are the same, not on other prompts.
    A prompt that does not fit into the context beside its text loses its beginning. Of the special tokens only those
    that end the text are generated.

    With a model over ranks every rank calls this. Those that read the same samples give the same prompts and get the
    same completions; those that read others may give others, or none. Equal prompts have random numbers of their own if
    they have different ``occurrences``, by default how many earlier prompts are the same. ``on_step`` is called after
    every forward pass.
    """
    rank_model = as_rank_model(model)
    requests = _requests(rank_model, tokenizer, prompts, params, occurrences)
    pieces = _run(rank_model, tokenizer, requests, batch_size, every_token=False, on_step=on_step or (lambda: None))
    completions = {piece.index: piece.completion for piece in pieces if piece.completion is not None}
    return [completions[index] for index in range(len(prompts))]


def stream(
    model: Z2all | ParallelModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    params: SamplingParams = DEFAULT_PARAMS,
    batch_size: int = DECODE_ROWS,
) -> Iterator[TextPiece]:
    """The texts of ``generate_batch`` piece by piece, as they are generated.

    A piece has whole characters only, and never the beginning of a stop string.

    >>> for piece in stream(model, tokenizer, ["Once upon a time"]):
    ...     print(piece.text, end="", flush=True)
    """
    rank_model = as_rank_model(model)
    requests = _requests(rank_model, tokenizer, prompts, params, occurrences=None)
    yield from _run(rank_model, tokenizer, requests, batch_size, every_token=True, on_step=lambda: None)


def _run(
    model: LocalModel | RankModel,
    tokenizer: Tokenizer,
    requests: list[GenerationRequest],
    batch_size: int,
    *,
    every_token: bool,
    on_step: Callable[[], None],
) -> Iterator[TextPiece]:
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1; it is {batch_size}")
    length = max((len(request.prompt_tokens) + request.max_tokens for request in requests), default=0)
    width = max((request.max_tokens for request in requests), default=0)
    size = DecoderSize(min(batch_size, len(requests)), length, width)
    decoder = Decoder(model, tokenizer, size, every_token=every_token, refill_share=REFILL_SHARE)
    # Prompts of similar length are read together; the longest first, so that memory is short at once or never.
    for request in sorted(requests, key=lambda request: -len(request.prompt_tokens)):
        decoder.add(request)
    with model.eval_mode():
        while not decoder.finished:
            yield from decoder.step()
            on_step()
        model.wait_for_others(on_step)


def _requests(
    model: LocalModel | RankModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    occurrences: Sequence[int] | None,
) -> list[GenerationRequest]:
    # Where the sequence is split over ranks, a pass is padded to equal parts, and the padding is in the context too.
    context = model.config.max_position_embeddings - (model.sequence_multiple - 1)
    max_prompt_tokens = context - min(params.max_tokens, context // 2)
    requests: list[GenerationRequest] = []
    counts: Counter[tuple[int, ...]] = Counter()
    for index, prompt in enumerate(prompts):
        # In training a document follows an end-of-text token, so a prompt does too.
        ids = [tokenizer.eos_token_id, *tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UsageError(f"prompt {index} has no tokens: give it at least the end-of-text token")
        ids = ids[-max_prompt_tokens:]
        most = min(params.max_tokens, context - len(ids))
        occurrence = counts[tuple(ids)] if occurrences is None else occurrences[index]
        requests.append(GenerationRequest(index, ids, most, params, occurrence))
        counts[tuple(ids)] += 1
    return requests
