"""Records of another kind of source: the message names the kind that reads them."""

from __future__ import annotations

from typing import Any

import pytest

from zero2all.conversation import SourceKind
from zero2all.corpus.chat_shapes import MalformedConversationError, find_example

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("record", "kind", "said"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "chat", "kind: preference"),
        ({"chosen": MESSAGES, "rejected": MESSAGES}, "chat", "kind: preference"),
        ({"chosen_messages": MESSAGES, "rejected_messages": MESSAGES}, "chat", "kind: preference"),
        ({"question": "q", "response_chosen": "a", "response_rejected": "b"}, "chat", "kind: preference"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "rating", "kind: preference"),
        ({"prompt": "q", "completion": "a", "label": True}, "chat", "kind: rating"),
        ({"messages": MESSAGES}, "preference", "kind: chat"),
        ({"text": "words"}, "chat", "no conversation in it"),
    ],
)
def test_the_message_names_the_kind(record: dict[str, Any], kind: SourceKind, said: str) -> None:
    with pytest.raises(MalformedConversationError, match=said):
        find_example(record, kind)
