"""``z2a export``: a checkpoint and its tokenizer for other programs.

Whether another program computes the same as our model is compared on fixed texts, token for token.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from zero2all.base.console import say
from zero2all.base.errors import UsageError, Z2aError, need, quiet_libraries
from zero2all.base.io import atomic_dir, atomic_path, write_json
from zero2all.base.manifest import checksums, write_manifest
from zero2all.base.network.http_client import shared_client
from zero2all.checkpoint.inspection import CheckpointWeights
from zero2all.export.gguf_file import GGUF_DTYPES, GGUFDtype, write_gguf
from zero2all.export.model_card import write_model_card
from zero2all.model import Z2all, export_hf
from zero2all.model.cost.model_size import count_parameters
from zero2all.model.hf import export_adapter
from zero2all.model.hf_config import ARCHITECTURES, hf_model_type
from zero2all.model.lora import merge_adapters
from zero2all.model.weights import MergedAdapters, WeightReader, unstored_weights
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.hf_directory import begin_with_token
from zero2all.train.run import Run, tokenizer_files

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "床前明月光，疑是地上霜。举头望明月，低头思故乡。",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "混合 text：import os  # 读取文件\n",
)
TOP_TOKENS = 64  # whose log-probabilities are compared at a position
CONTEXT = 512
TIMEOUT = 600.0  # of one request


@torch.inference_mode()
def transformers_difference(model: Z2all, tokenizer: Tokenizer, exported: Path, begin_id: int | None) -> float:
    """Largest absolute logit difference between our model and transformers, in fp32."""
    transformers = need("transformers", "hf")
    transformers.utils.logging.disable_progress_bar()
    with quiet_libraries():  # it imports what it finds installed, torchao among it
        theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
        theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    differences = []
    for text in PROBES:
        ids = prompt_ids(tokenizer, text, begin_id)
        if theirs_tokenizer(text)["input_ids"] != ids:
            raise Z2aError(f"nothing was written: the exported tokenizer splits {text!r} differently")
        tokens = torch.tensor([ids[: model.config.max_position_embeddings]])
        differences.append((model(tokens) - theirs(tokens).logits).abs().max())
    return float(torch.stack(differences).max())  # NaN if one of them is, unlike with Python's max


def prompt_ids(tokenizer: Tokenizer, text: str, begin_id: int | None) -> list[int]:
    return [*([] if begin_id is None else [begin_id]), *tokenizer.encode(text)]


class LlamaCpp:
    """A GGUF file in llama.cpp, in this process, with the arithmetic of the CPU in fp32.

    >>> engine = LlamaCpp(Path("model-f32.gguf"))
    >>> engine.logprobs([1, 2, 3])  # of the likeliest next tokens, by id
    """

    def __init__(self, path: Path, context: int = CONTEXT, slots: int = 1) -> None:
        """``slots`` requests, of ``context`` tokens each, are generated at the same time."""
        xllamacpp = _xllamacpp()
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.port = context * slots, slots, False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.use_jinja, params.verbosity, params.ui = True, -1, False
        self._server = xllamacpp.Server(params)
        self._text_token: int = self.post("/tokenize", {"content": "a", "add_special": False})["tokens"][0]

    @property
    def address(self) -> str:
        """The address of its HTTP server, on loopback."""
        return str(self._server.listening_address)

    def logprobs(self, ids: Sequence[int], top: int = TOP_TOKENS) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens after a prompt."""
        # It reports none after a special token, so another one is generated; the reported ones are without this bias.
        request = {"n_predict": 1, "n_probs": top, "temperature": 0.0, "logit_bias": [[self._text_token, 1e4]]}
        answer = self.complete({"prompt": list(ids), **request})
        [position] = answer["completion_probabilities"]
        return {entry["id"]: entry["logprob"] for entry in position["top_logprobs"]}

    def tokenize(self, text: str) -> list[int]:
        """With the token that text begins with, if the file names one."""
        ids: list[int] = self.post("/tokenize", {"content": text, "add_special": True})["tokens"]
        return ids

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.post("/completion", {"cache_prompt": False, **request})
        return answer

    def post(self, path: str, request: dict[str, Any]) -> Any:
        """What its HTTP server answers."""
        client = shared_client(TIMEOUT, trust_env=False)  # on loopback, where no proxy leads
        reply = client.post(f"{self.address}{path}", json=request)
        if reply.status_code != 200:
            raise Z2aError(f"llama.cpp: {reply.text[:200]}")
        return reply.json()


def _xllamacpp() -> Any:
    try:
        return importlib.import_module("xllamacpp")
    except ImportError:
        raise Z2aError("--check of a GGUF file runs llama.cpp: pip install xllamacpp") from None


@torch.inference_mode()
def llama_cpp_difference(model: Z2all, tokenizer: Tokenizer, path: Path, begin_id: int | None) -> float:
    """Largest absolute difference of log-probabilities between our model and llama.cpp, over its likeliest tokens."""
    context = min(CONTEXT, model.config.max_position_embeddings)
    engine = LlamaCpp(path)
    differences = []
    for text in PROBES:
        ids = prompt_ids(tokenizer, text, begin_id)
        if engine.tokenize(text) != ids:
            raise Z2aError(f"nothing was written: llama.cpp splits {text!r} differently")
        for length in sorted({len(ids) // 2, len(ids)}):
            prompt = ids[: min(length, context - 2)]
            ours = model(torch.tensor([prompt]))[0, -1, : tokenizer.vocab_size].log_softmax(-1)
            differences += [abs(float(ours[id]) - logprob) for id, logprob in engine.logprobs(prompt).items()]
    return float(torch.tensor(differences).max())


KIND = "export"
TOLERANCES = {"hf": 1e-4, "gguf": 1e-3}
"""Tolerances of logits in transformers, and of log-probabilities in llama.cpp, in fp32."""
ENGINES = {"hf": ("transformers", "transformers"), "gguf": ("llama.cpp", "xllamacpp")}
"""The program that a format is compared in, and the package that has it."""
HF_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ExportFormat = Literal["hf", "gguf"]
ExportDtype = GGUFDtype


@dataclass(frozen=True)
class ExportResult:
    """What was written, and how far it agrees with the run."""

    out: str
    """The directory, or the GGUF file in it."""
    architecture: str
    dtype: str
    parameters: int
    step: int
    engine: str | None = None
    """The program that it was compared in; None if it was not."""
    max_difference: float | None = None
    """Largest difference of logits (transformers) or log-probabilities (llama.cpp)."""


def export_run(
    run: Run,
    out: Path,
    step: int | None = None,
    format: ExportFormat = "hf",
    dtype: ExportDtype | None = None,
    check: bool | None = None,
) -> ExportResult:
    """Write the newest (or a given) checkpoint to ``out``, one tensor or file at a time.

    >>> export_run(Run.open("runs/first"), Path("runs/first/gguf"), format="gguf", dtype="q8_0")

    With ``check``, only if transformers or llama.cpp computes the same; None: if that program is installed. Adapters
    (``model.lora``) are merged into the weights. ``dtype`` is f32 by default, f16 for GGUF.
    """
    dtype = dtype or ("f32" if format == "hf" else "f16")
    if dtype not in (HF_DTYPES if format == "hf" else GGUF_DTYPES):
        raise UsageError(f"{dtype} is for --format gguf; --format hf takes {', '.join(HF_DTYPES)}")
    check = _can_check(format, check)
    step, tokenizer, begin_id = run.valid_step(step), run.tokenizer(), begin_token(run)
    weights: WeightReader = CheckpointWeights(run.checkpoints.path(step))
    if weights.config.lora is not None:
        weights = MergedAdapters(weights)
    unstored_weights(weights)  # raises an error if one is missing that cannot be
    architecture = ARCHITECTURES[hf_model_type(weights.config)]
    with atomic_dir(out, KIND) as partial:
        if format == "hf":
            written = partial
            _write_hf(weights, tokenizer, partial, HF_DTYPES[dtype], begin_id)
        else:
            written = partial / f"{run.recipe.name}-{dtype}.gguf"
            write_gguf(written, weights, tokenizer, dtype, run.recipe.name, begin_id)
        result = ExportResult(
            out="" if format == "hf" else written.name,
            architecture=architecture,
            dtype=dtype,
            parameters=count_parameters(weights.config).total,
            step=step,
            engine=ENGINES[format][0] if check else None,
            max_difference=_difference(run, step, written, format, dtype, begin_id) if check else None,
        )
        write_model_card(run, result, weights.config, partial)
        write_manifest(partial, KIND, {**_provenance(run), "result": asdict(result), "files": checksums(partial)})
    return replace(result, out=str(out / result.out))


def _provenance(run: Run) -> dict[str, object]:
    """What the export is of; without paths, since exports are published."""
    identity = run.identity()
    return {"run": asdict(replace(identity, init=identity.init and Path(identity.init).name))}


def begin_token(run: Run) -> int | None:
    """The token that a prompt begins with: in pretraining a document follows an end-of-text token, and in fine-tuning
    a conversation begins with what the chat template writes."""
    return None if run.recipe.train.objective.is_chat else run.tokenizer().eos_token_id


def _can_check(format: ExportFormat, check: bool | None) -> bool:
    engine, package = ENGINES[format]
    if check and importlib.util.find_spec(package) is None:
        raise Z2aError(f"--check runs {engine}: pip install {package}")
    if check is None:
        try:
            importlib.import_module(package)
        except ImportError:
            say(f"not compared with {engine}, which is not installed: pip install {package}, or --no-check")
            return False
        except Exception as error:  # installed, and of no use on this system
            say(f"not compared with {engine}, which cannot be imported ({error})")
            return False
    return check is not False


def _write_hf(weights: WeightReader, tokenizer: Tokenizer, out: Path, dtype: torch.dtype, begin_id: int | None) -> None:
    export_hf(weights, out, tokenizer.stop_token_ids, dtype, begin_id=begin_id)
    _copy_tokenizer(tokenizer, out, begin_id)


def _copy_tokenizer(tokenizer: Tokenizer, out: Path, begin_id: int | None) -> None:
    """The files of the tokenizer, which says whether text begins with a token."""
    for path in tokenizer_files(tokenizer):
        shutil.copy(path, out / path.name)
    names = {id: name for name, id in tokenizer.special_ids.items()}
    name = None if begin_id is None else names[begin_id]
    with atomic_path(out / "tokenizer.json") as path:
        path.write_bytes(begin_with_token(tokenizer.json_bytes, name, begin_id))
    config = out / "tokenizer_config.json"
    values = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    begin = {} if name is None else {"bos_token": name}
    write_json(config, {**values, **begin, "add_bos_token": begin_id is not None})


def _difference(
    run: Run, step: int, written: Path, format: ExportFormat, dtype: ExportDtype, begin_id: int | None
) -> float:
    """How far another program is from our model; an error if it should be nothing."""
    model, tokenizer = _merged_model(run, step), run.tokenizer()
    compare = transformers_difference if format == "hf" else llama_cpp_difference
    difference = compare(model, tokenizer, written, begin_id)
    if not math.isfinite(difference) or (dtype == "f32" and difference > TOLERANCES[format]):
        what = "logits" if format == "hf" else "log-probabilities"
        raise Z2aError(f"nothing was written: in {ENGINES[format][0]} the {what} differ by {difference:.2e}")
    return difference


def _merged_model(run: Run, step: int) -> Z2all:
    model = run.load_model(step)
    merge_adapters(model)
    return model


def export_adapter_of_run(run: Run, out: Path, step: int | None = None, dtype: ExportDtype = "f32") -> str:
    """Write the adapters of a run (``model.lora``) to ``out`` in PEFT's format, with the tokenizer. Returns the path
    of the base model."""
    if dtype not in HF_DTYPES:
        raise UsageError(f"adapters are written in {', '.join(HF_DTYPES)}")
    model, tokenizer, init = run.load_model(step), run.tokenizer(), run.initial_weights()
    with atomic_dir(out, KIND) as partial:
        base = init.path if init is not None else ""
        export_adapter(model, partial, base, HF_DTYPES[dtype])
        _copy_tokenizer(tokenizer, partial, begin_token(run))
        write_manifest(partial, KIND, {**_provenance(run), "files": checksums(partial)})
    return base
