"""Chat formats in use, as rows of the oracle's table: where each places bos, eos and the ends of turns.

The templates are written for these tests. Each has the structure of the model that it stands for, and marks what the
assistant writes with generation tags. Tokenizers of published models have no such tags: ``published`` removes them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal

VOCAB_SIZE = 640  # of every tokenizer, so that one model serves all of them
TEXT_TOKENS = 600
WORDS = (
    "the model reads a line of text and then it says what comes next because small steps make long roads "
    "user assistant system question answer why does rain fall on green hills in spring 春眠不觉晓 处处闻啼鸟 "
)
GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
Special = dict[str, int]


@dataclass(frozen=True)
class Template:
    """One row: a tokenizer with a chat template."""

    name: str
    stands_for: str
    """The model whose structure it has."""
    vocabulary: Literal["byte-level", "sentencepiece"]
    special: tuple[str, ...]
    """Besides ``<unk>``, ``<s>`` and ``</s>``, which sentencepiece always has."""
    eos: str
    source: str
    bos: str | None = None
    pad: str | None = None

    @property
    def published(self) -> str:
        """The template without generation tags."""
        return GENERATION_TAG.sub("", self.source)

    def write(self, directory: Path, with_tags: bool = False) -> Path:
        """A tokenizer directory as a published model has it."""
        directory.mkdir(parents=True)
        definition = _byte_level(self) if self.vocabulary == "byte-level" else _sentencepiece(self)
        names = {"eos_token": self.eos, "bos_token": self.bos, "pad_token": self.pad}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{role: name for role, name in names.items() if name is not None},
            "chat_template": self.source if with_tags else self.published,
            "clean_up_tokenization_spaces": False,
        }
        (directory / "tokenizer.json").write_text(json.dumps(definition, ensure_ascii=False), "utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        return directory


@cache
def _text_model(vocabulary: Literal["byte-level", "sentencepiece"]) -> dict[str, Any]:
    """``tokenizer.json`` of BPE on a few words, without special tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if vocabulary == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        first: list[str] = []
    else:
        first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS, special_tokens=first, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    # Words as units: without a pre-tokenizer whole lines would become tokens.
    words = WORDS.split() if vocabulary == "sentencepiece" else [WORDS]
    tokenizer.train_from_iterator(words, trainer)
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    definition["added_tokens"] = []
    return definition


def _with_special(definition: dict[str, Any], names: list[str], bos: str | None) -> dict[str, Any]:
    """Special tokens after those of text, and unused ones up to the size that all tokenizers have."""
    copied: dict[str, Any] = json.loads(json.dumps(definition))
    vocab = copied["model"]["vocab"]
    ids = {name: vocab[name] for name in names if name in vocab}
    free = count(len(vocab))
    new = [name for name in names if name not in vocab]
    ids |= {name: next(free) for name in new}
    ids |= {f"<|unused_{number}|>": number for number in range(next(free), VOCAB_SIZE)}
    copied["added_tokens"] = [
        {"id": id, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for name, id in sorted(ids.items(), key=lambda item: item[1])
    ]  # fmt: skip
    if bos is not None:  # as Llama and DeepSeek have it: plain text starts with bos, a rendered chat has its own
        token, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        copied["post_processor"] = {
            "type": "TemplateProcessing", "single": [token, text], "pair": [token, text, text],
            "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
        }  # fmt: skip
    return copied


def _byte_level(template: Template) -> dict[str, Any]:
    return _with_special(_text_model("byte-level"), list(template.special), template.bos)


def _sentencepiece(template: Template) -> dict[str, Any]:
    return _with_special(_text_model("sentencepiece"), ["<unk>", "<s>", "</s>", *template.special], template.bos)


TEMPLATES = (
    Template(
        "Llama 3",
        "meta-llama/Meta-Llama-3-8B-Instruct: bos once, eos after every message",
        "byte-level",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        source="""\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content | trim + '<|eot_id|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}""",
    ),
    Template(
        "Llama 2",
        "meta-llama/Llama-2-7b-chat-hf: bos before every question, eos after every answer",
        "sentencepiece",
        (),
        eos="</s>",
        bos="<s>",
        source="""\
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' -%}
{%- elif message.role == 'user' -%}
{{- bos_token + '[INST] ' + ns.system + message.content + ' [/INST]' -}}
{%- set ns.system = '' -%}
{%- else -%}
{%- generation -%}{{- ' ' + message.content + ' ' + eos_token -}}{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}""",
    ),
    Template(
        "Mistral",
        "mistralai/Mistral-7B-Instruct-v0.3: bos once, special tokens around a question, eos after every answer",
        "sentencepiece",
        ("[INST]", "[/INST]"),
        eos="</s>",
        bos="<s>",
        source="""\
{%- set ns = namespace(system='') -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = message.content + '\\n\\n' -%}
{%- elif message.role == 'user' -%}
{{- '[INST] ' + ns.system + message.content + '[/INST]' -}}
{%- set ns.system = '' -%}
{%- else -%}
{%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}""",
    ),
    Template(
        "Zephyr",
        "HuggingFaceH4/zephyr-7b-beta and TinyLlama-1.1B-Chat: roles as plain text, eos after every message, no bos",
        "sentencepiece",
        (),
        eos="</s>",
        bos="<s>",
        source="""\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>\\n' -}}{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}
{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}""",
    ),
    Template(
        "DeepSeek",
        "deepseek-ai/DeepSeek-V3: bos once, a special token for each role, eos after every answer",
        "byte-level",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        source="""\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- message.content -}}
{%- elif message.role == 'user' -%}
{{- '<｜User｜>' + message.content + '<｜Assistant｜>' -}}
{%- else -%}
{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}""",
    ),
    Template(
        "Qwen",
        "Qwen/Qwen2.5-7B-Instruct: im_end after every message, a separate token ends documents, a default system text",
        "byte-level",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
        pad="<|endoftext|>",
        source="""\
{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nthe model says<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}""",
    ),
    Template(
        "ChatML",
        "teknium/OpenHermes-2.5-Mistral-7B: im_end after every message, which is also eos",
        "sentencepiece",
        ("<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
        bos="<s>",
        source="""\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}""",
    ),
)
