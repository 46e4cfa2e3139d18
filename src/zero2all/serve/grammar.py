"""Answers that follow a JSON schema: only tokens that can still lead to valid JSON are generated."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero2all.errors import UsageError, need
from zero2all.tokenizer import Tokenizer

MAX_SCHEMA_CHARACTERS = 100_000
ANY_OBJECT = {"type": "object"}
COMPACT = {"whitespace_flexible": False}  # else a small model may write spaces until the limit


class JsonGrammars:
    """Compiles schemas for one tokenizer.

    >>> constraint = JsonGrammars(tokenizer, rows=16384).compile({"type": "object"})
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._llguidance = need("llguidance", "serve")
        self._vocab_size = tokenizer.vocab_size
        self._tokenizer = self._llguidance.LLTokenizer(
            tokenizer.json_bytes.decode("utf-8"), n_vocab=tokenizer.vocab_size, eos_token=tokenizer.stop_token_ids
        )

    def compile(self, schema: dict[str, Any]) -> JsonConstraint:
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            raise UsageError(f"the JSON schema has more than {MAX_SCHEMA_CHARACTERS} characters")
        try:
            grammar = self._llguidance.LLMatcher.grammar_from_json_schema(text, defaults=COMPACT)
        except ValueError as error:
            raise UsageError(f"the JSON schema cannot be used: {error}") from error
        matcher = self._llguidance.LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise UsageError(f"the JSON schema cannot be used: {matcher.get_error().splitlines()[0]}")
        return JsonConstraint(matcher, self._vocab_size)


class JsonConstraint:
    """The state of one answer."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> Tensor:
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(packed, bitorder="little")[: self._vocab_size].astype(bool))

    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
