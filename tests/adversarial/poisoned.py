"""Directories and files from elsewhere that would run code if anything in them were unpickled, imported or trusted."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from tests.adversarial.payload import Payload

# Templates come with models. Each of these reaches for Python behind the text.
TEMPLATES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}",
    "attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "loop": "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}",
    "memory": "{{ 'x' * 10**10 }}",
    "import": "{% import '/etc/passwd' as x %}{% include '/etc/passwd' %}",
}
MODELING = "import os\nos.mkdir('MARK')\n"
AUTO_MAP = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoTokenizer": ["tokenization_evil.Evil", None]}


def _pickles(directory: Path, mark: Path, *names: str) -> None:
    for name in names:
        torch.save({"weight": Payload(mark)}, directory / name)


def _plain_pickles(directory: Path, mark: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_bytes(pickle.dumps(Payload(mark)))


def hf_with_pickles(good: Path, out: Path, mark: Path) -> None:
    """As most models were shared for years."""
    shutil.copytree(good, out, ignore=shutil.ignore_patterns("*.safetensors"))
    _pickles(out, mark, "pytorch_model.bin", "model.pt", "adapter_model.bin", "optimizer.pt", "training_args.bin")


def hf_with_both(good: Path, out: Path, mark: Path) -> None:
    shutil.copytree(good, out)
    _pickles(out, mark, "pytorch_model.bin", "consolidated.00.pth", "rng_state.pth", "scheduler.pt")
    _plain_pickles(out, mark, "tokenizer.pkl", "vocab.pkl")


def hf_pickle_named_safetensors(good: Path, out: Path, mark: Path) -> None:
    shutil.copytree(good, out)
    for path in out.glob("*.safetensors"):
        torch.save({"weight": Payload(mark)}, path)


def hf_with_code(good: Path, out: Path, mark: Path) -> None:
    """As models that ask for trust_remote_code."""
    shutil.copytree(good, out)
    for name in ("modeling_evil.py", "tokenization_evil.py", "configuration_evil.py", "setup.py", "sitecustomize.py"):
        (out / name).write_text(MODELING.replace("MARK", str(mark)))
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps({**values, "auto_map": AUTO_MAP, "trust_remote_code": True}))


def hf_with_template(template: str) -> Callable[[Path, Path, Path], None]:
    def make(good: Path, out: Path, mark: Path) -> None:
        shutil.copytree(good, out)
        text = TEMPLATES[template].replace("MARK", str(mark))
        values = json.loads((out / "tokenizer_config.json").read_text())
        (out / "tokenizer_config.json").write_text(json.dumps({**values, "chat_template": text}))
        (out / "chat_template.jinja").write_text(text)

    return make


def hf_tokenizer_pickle(good: Path, out: Path, mark: Path) -> None:
    shutil.copytree(good, out)
    _plain_pickles(out, mark, "tokenizer.json", "tokenizer.model")


def adapter(good: Path, out: Path, mark: Path) -> None:
    out.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(good), "r": 4, "auto_mapping": AUTO_MAP}
    (out / "adapter_config.json").write_text(json.dumps(config))
    _pickles(out, mark, "adapter_model.bin")
    shutil.copy(out / "adapter_model.bin", out / "adapter_model.safetensors")


def gguf(good: Path, out: Path, mark: Path) -> None:
    """Counts beyond any memory, and a template; then a pickle."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60)
    text = TEMPLATES["globals"].replace("MARK", str(mark)).encode()
    out.with_suffix("").mkdir(exist_ok=True)
    out.write_bytes(head + struct.pack("<Q", 1 << 62) + text + pickle.dumps(Payload(mark)))


def tokens_of_pickles(good: Path, out: Path, mark: Path) -> None:
    out.mkdir()
    _plain_pickles(out, mark, "manifest.json", "recipe.yaml", "identity.json", "record.jsonl", "key")
    for split in ("train", "valid"):
        (out / split).mkdir()
        _plain_pickles(out / split, mark, "en-00000.bin", "en-00000.idx", "en-00000.docs.arrow", "en-00000.json")


def run_of_pickles(good: Path, out: Path, mark: Path) -> None:
    """A run directory whose files are all pickles, with a checkpoint that says it is whole."""
    tokens_of_pickles(good, out, mark)
    (out / "recipe.yaml").write_text("train: {steps: 1}\n")
    (out / "identity.json").write_text("{}")
    step = out / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    _plain_pickles(step, mark, ".metadata", "__0_0.distcp", "state.json", "manifest.json", "config.json")


ARTIFACTS: dict[str, Callable[[Path, Path, Path], None]] = {
    "a Hugging Face directory of pickles": hf_with_pickles,
    "safetensors beside pickles": hf_with_both,
    "a pickle named safetensors": hf_pickle_named_safetensors,
    "code beside the weights": hf_with_code,
    "a tokenizer that is a pickle": hf_tokenizer_pickle,
    "a LoRA adapter": adapter,
    "a GGUF file": gguf,
    "a token store of pickles": tokens_of_pickles,
    "a run of pickles": run_of_pickles,
    **{f"a template: {name}": hf_with_template(name) for name in TEMPLATES},
}
