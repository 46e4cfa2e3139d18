"""The files of a tokenizer directory that ``AutoTokenizer.from_pretrained`` reads without custom code."""

from __future__ import annotations

import json
import re
from pathlib import Path

from zero2all.base.io import atomic_path, write_json, write_text
from zero2all.tokenizer.sentencepiece_model import MODEL_FILE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""All that ``Tokenizer`` reads."""
NO_PROCESSOR = re.compile(rb'("post_processor":\s*)null')


def write_hf_directory(
    directory: Path,
    definition: bytes,
    named_tokens: dict[str, str],
    chat_template: str | None,
    model: bytes | None = None,
) -> None:
    """``definition`` is ``tokenizer.json``, ``named_tokens`` are by role, such as ``eos_token``, and ``model`` is
    ``tokenizer.model`` of the same vocabulary, for programs that read that."""
    for name, data in (("tokenizer.json", definition), (MODEL_FILE, model)):
        if data is not None:
            with atomic_path(directory / name) as path:
                path.write_bytes(data)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named_tokens,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    write_json(directory / "tokenizer_config.json", config)
    if chat_template is not None:
        write_text(directory / "chat_template.jinja", chat_template)


def begin_with_token(definition: bytes, name: str | None, id: int | None) -> bytes:
    """A ``tokenizer.json`` by which other programs begin every text with a token, or with none.

    Only the post-processor changes, which ``Tokenizer`` does not use.
    """
    values = json.loads(definition)
    wanted = "null" if name is None or id is None else _begin_processor(name, id)
    present = values.get("post_processor")
    if present == json.loads(wanted):
        return definition
    if present is None and len(NO_PROCESSOR.findall(definition)) == 1:
        return NO_PROCESSOR.sub(lambda found: found[1] + wanted.encode(), definition)
    return json.dumps({**values, "post_processor": json.loads(wanted)}, ensure_ascii=False).encode()


def without_begin_token(definition: bytes, name: str, id: int) -> bytes:
    """The bytes before ``begin_with_token``, so that an export has the fingerprint of the tokenizer of its run."""
    return definition.replace(_begin_processor(name, id).encode(), b"null")


def _begin_processor(name: str, id: int) -> str:
    token, first, second = (
        {kind: {"id": value, "type_id": type_id}}
        for kind, value, type_id in (("SpecialToken", name, 0), ("Sequence", "A", 0), ("Sequence", "B", 1))
    )
    return json.dumps(
        {
            "type": "TemplateProcessing",
            "single": [token, first],
            "pair": [token, first, second],
            "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]}},
        },
        ensure_ascii=False,
    )
