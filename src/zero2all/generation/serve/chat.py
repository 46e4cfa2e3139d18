"""A conversation with a model: history, parameters and the answers as they are generated."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, fields, replace

from zero2all.base.errors import UsageError
from zero2all.generation import SamplingParams, stream
from zero2all.model import Z2all
from zero2all.tokenizer import Tokenizer

Message = dict[str, str]


@dataclass(frozen=True)
class AnswerStats:
    """How an answer was generated."""

    prompt_tokens: int
    tokens: int
    seconds: float
    finish_reason: str
    """stop: the model ended its message; length: the limit did."""
    forgotten: int
    """Messages that no longer fit into the context."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def with_param(params: SamplingParams, text: str) -> SamplingParams:
    """With one changed, such as ``temperature=0.2``; ``stop`` adds a string."""
    name, found, value = text.partition("=")
    kinds = {field.name: type(getattr(SamplingParams(), field.name)) for field in fields(params)}
    if not found or name not in kinds:
        raise UsageError(f"{text!r}: write NAME=VALUE, with one of {', '.join(kinds)}")
    if name == "stop":
        return replace(params, stop=(*params.stop, value))
    try:
        return replace(params, **{name: kinds[name](value)})
    except ValueError:
        raise UsageError(f"{name} must be a number; it is {value!r}") from None


class ChatSession:
    """
    >>> session = ChatSession(target.model, target.tokenizer, system="Be brief.")
    >>> "".join(session.answer("Who are you?"))
    >>> session.stats.tokens_per_second
    """

    def __init__(
        self, model: Z2all, tokenizer: Tokenizer, params: SamplingParams | None = None, system: str = ""
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.params, self.system = params or SamplingParams(), system
        self.messages: list[Message] = []
        self.stats: AnswerStats | None = None
        self._prompt([{"role": "user", "content": "a"}])  # fails now if the tokenizer has no chat template

    def reset(self) -> None:
        """Forget the conversation; the system prompt and the parameters stay."""
        self.messages = []

    def answer(self, text: str) -> Generator[str]:
        """The answer to a message, piece by piece. It is in the history when it is complete, or was interrupted."""
        question: Message = {"role": "user", "content": text}
        prompt, forgotten = self._fitting_prompt(question)
        self.messages = [*self.messages[forgotten:], question]
        begin, said = time.perf_counter(), ""
        tokens, reason = 0, "interrupted"
        try:
            for piece in stream(self.model, self.tokenizer, [prompt], self.params):
                tokens += 1
                if piece.completion is not None:
                    tokens, reason = len(piece.completion.tokens), piece.completion.finish_reason
                said += piece.text
                yield piece.text
        finally:
            self.messages.append({"role": "assistant", "content": said})
            seconds = time.perf_counter() - begin
            self.stats = AnswerStats(len(prompt), tokens, seconds, reason, forgotten)

    def _fitting_prompt(self, question: Message) -> tuple[list[int], int]:
        """The prompt without the oldest turns, if the context is too short for all, and the messages left out."""
        context = self.model.config.max_position_embeddings
        room = context - min(self.params.max_tokens, context // 2)
        for forgotten in range(0, len(self.messages) + 1, 2):
            prompt = self._prompt([*self.messages[forgotten:], question])
            if len(prompt) <= room:
                return prompt, forgotten
        raise UsageError(f"the message has {len(prompt)} tokens, and the context of the model takes {room}")

    def _prompt(self, messages: list[Message]) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.tokenizer.render_chat([*system, *messages], add_generation_prompt=True)
