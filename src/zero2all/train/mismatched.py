"""Prompts with the answers to other prompts: KTO estimates from them how far the model is from the reference."""

from __future__ import annotations

import numpy as np

from zero2all.tokens.conversation_rows import ConversationRows
from zero2all.tokens.token_store import Array


class MismatchedAnswers:
    """For each document of a source, its prompt with the answer of the next document that is trained on.

    The pairs depend on the store alone, so that the reference scores each once.
    """

    def __init__(self, rows: ConversationRows) -> None:
        self.seq_len, self._rows = rows.seq_len, rows
        used = rows.used_documents
        self._next = np.full(rows.num_documents, -1, dtype=np.int64)
        self._next[used] = np.roll(used, -1)
        self.lengths = np.full(rows.num_documents, np.iinfo(np.int64).max, dtype=np.int64)
        for number in used.tolist():
            self.lengths[number] = len(self.read(number)[0])

    def read(self, number: int) -> tuple[Array, Array]:
        """Tokens, and which of them are the answer."""
        tokens, mask = self._rows.read_document(number)
        other, other_mask = self._rows.read_document(int(self._next[number]))
        prompt = tokens[: int(mask.argmax())]
        places = np.flatnonzero(other_mask)
        answer, answer_mask = (values[places[0] : places[-1] + 1] for values in (other, other_mask))
        # The end-of-text token keeps it apart from what follows in the row.
        return (
            np.concatenate([prompt, answer, tokens[-1:]]),
            np.concatenate([np.zeros(len(prompt), dtype=bool), answer_mask, [False]]),
        )
