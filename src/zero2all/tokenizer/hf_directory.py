"""The files of a tokenizer directory that ``AutoTokenizer.from_pretrained`` reads without custom code."""

from __future__ import annotations

from pathlib import Path

from zero2all.io import atomic_path, write_json, write_text
from zero2all.tokenizer.sentencepiece_model import MODEL_FILE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""All that ``Tokenizer`` reads."""


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
