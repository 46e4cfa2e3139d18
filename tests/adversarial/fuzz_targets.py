"""Every reader, loader, record and route with valid examples, and what it may raise."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from starlette.testclient import TestClient

from tests.adversarial.fuzz import Target
from tests.corpus import document_files
from tests.track.test_hostile import BAD_ENTRIES, BAD_LINES, UNUSUAL_LINES, make, show_everything
from zero2all.base.errors import Z2aError
from zero2all.base.network.connection import (
    GREETING_BYTES,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    REFUSED,
    WELCOME,
    ClientHandshake,
    SignedSession,
    TamperedError,
    frame_length,
)
from zero2all.checkpoint import CheckpointStore, RankGroup
from zero2all.checkpoint.staged_slot import find_staged_slots
from zero2all.checkpoint.state_dict import training_state_dict
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE
from zero2all.corpus.readers import RawFile, UnreadableFileError, read_record_chunks
from zero2all.model import HFWeights
from zero2all.recipe import builtin_recipe_path, parse_recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import TokenStore
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView
from zero2all.track.server import build_app
from zero2all.track.ssh import parse_address

KEY = "a key of the fuzzer"


@cache
def scratch() -> Path:
    """Of this process and its children, which are forked later: they end without removing anything."""
    directory = Path(tempfile.mkdtemp(prefix="z2a-fuzz-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(directory, ignore_errors=True) if os.getpid() == owner else None)
    return directory


scratch()


@contextmanager
def workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=scratch()) as directory:
        yield Path(directory)


def reader(name: str, data: bytes) -> Target:
    def attempt(changed: bytes) -> None:
        with workplace() as directory:
            (directory / name).write_bytes(changed)
            with suppress(UnreadableFileError):
                for _ in read_record_chunks(RawFile.from_path(directory / name)):
                    pass

    return Target(f"reader: {name}", lambda: [data], attempt)


def refuses(call: Callable[[], object]) -> None:
    with suppress(Z2aError):
        call()


def recipe_examples() -> Sequence[bytes]:
    return [builtin_recipe_path("quickstart.yaml").read_bytes(), b"train: {steps: 1, optimizer: {lr: 1e-3}}\nseed: 3\n"]


@cache
def tokenizer_json() -> bytes:
    from tokenizers import Tokenizer as Built
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    built = Built(BPE())
    built.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=ByteLevel.alphabet())
    built.train_from_iterator(["the text of a tokenizer"], trainer)
    return str(built.to_str()).encode()


def load_tokenizer(data: bytes) -> None:
    with workplace() as directory:
        (directory / "tokenizer.json").write_bytes(data)
        refuses(lambda: Tokenizer(directory).encode("some text"))


@cache
def metadata() -> bytes:
    from tests.checkpoint.helpers import TRAINING_STATE

    model = torch.nn.Linear(4, 4)
    store = CheckpointStore(scratch() / "checkpoints")
    state = training_state_dict(model, [torch.optim.SGD(model.parameters(), momentum=0.9)])
    store.write(1, state, TRAINING_STATE, UNKNOWN_LINEAGE, RankGroup())
    return (store.path(1) / ".metadata").read_bytes()


def read_checkpoint(data: bytes) -> None:
    store = CheckpointStore(scratch() / "checkpoints")
    with workplace() as directory:
        shutil.copytree(store.path(1), directory / "step-00000001")
        (directory / "step-00000001" / ".metadata").write_bytes(data)
        refuses(lambda: CheckpointStore(directory).reader(1).read_metadata())


CONFIG = json.dumps({
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": True,
}).encode()  # fmt: skip


@cache
def safetensors() -> bytes:
    from safetensors.torch import save

    return bytes(save({"model.norm.weight": torch.ones(8), "model.embed_tokens.weight": torch.ones(32, 8)}))


def load_weights(config: bytes, weights: bytes) -> None:
    with workplace() as directory:
        (directory / "config.json").write_bytes(config)
        (directory / "model.safetensors").write_bytes(weights)
        refuses(lambda: HFWeights(directory))


def open_store(data: bytes) -> None:
    with workplace() as directory:
        (directory / "manifest.json").write_bytes(data)
        (directory / "train").mkdir()
        refuses(lambda: TokenStore(directory, "train"))


SHARD = {"documents": 1, "tokens": 2, "bytes": 3, "shards": 1, "shard_tokens": [2], "records": ["0" * 64]}
SPLITS = {"train": {"en": SHARD}}
STORE = json.dumps({"kind": "tokens", "format": 2, "tokenizer": "x", "vocab_size": 9, "splits": SPLITS})


def record_examples() -> Sequence[bytes]:
    lines = [*BAD_LINES.values(), *UNUSUAL_LINES.values()]
    good = [b'{"event":"start","step":0,"steps":9,"time":0}\n{"step":0,"time":1,"loss":5.5,"tokens":100}\n']
    good += [b'{"sample":"zh","step":1,"text":"x"}\n{"histogram":"a","step":1,"counts":[1,2],"edges":[0,1,2]}\n']
    return [*good, *(line.encode("utf-8", "replace") + b"\n" for line in lines if len(line) < 500)]


def read_record(data: bytes) -> None:
    with workplace() as directory:
        run = RunView(LocalRunLocation(make(directory / "run", data)))
        run.refresh()
        assert run.read_error is None or "this is a bug" not in run.read_error
        show_everything(run)


def index_examples() -> Sequence[bytes]:
    return [entry.encode() + b"\n" for entry in BAD_ENTRIES.values() if len(entry) < 1000]


def read_index(data: bytes) -> None:
    with workplace() as directory:
        (make(directory / "run") / "record.index.jsonl").write_bytes(data)
        run = RunView(LocalRunLocation(directory / "run"))
        run.refresh()
        show_everything(run)


def read_slot(data: bytes) -> None:
    with workplace() as directory:
        (directory / "rank-0-of-1").mkdir()
        (directory / "rank-0-of-1" / "slot-0.json").write_bytes(data)
        find_staged_slots(directory)


@cache
def client() -> TestClient:
    run = RunView(LocalRunLocation(make(Path(tempfile.mkdtemp(dir=scratch())) / "served")))
    run.refresh()
    return TestClient(build_app([run], KEY), raise_server_exceptions=True)


ROUTES = [
    f"/api/runs?key={KEY}", f"/api/runs/0/series?key={KEY}&name=loss&points=5&from=0&to=9",
    f"/api/runs/0/text?key={KEY}&kind=sample&name=zh&step=3", f"/api/runs/0/facts?key={KEY}",
    f"/api/runs/0/documents?key={KEY}&step=3", f"/api/experiments?key={KEY}", f"/metrics?key={KEY}",
    "/assets/index.html", "/",
]  # fmt: skip


def ask(data: bytes) -> None:
    path, _, query = data.decode("latin-1").partition("?")
    scope_path = path if path.startswith("/") else f"/{path}"
    request = client().build_request("GET", "http://testserver/")
    request.url = request.url.copy_with(raw_path=_raw(scope_path, query))
    assert client().send(request).status_code < 500


def _raw(path: str, query: str) -> bytes:
    from urllib.parse import quote

    return (quote(path, safe="/%:") + "?" + quote(query, safe="=&%")).encode("ascii")


def open_frame(data: bytes) -> None:
    session = SignedSession(b"secret", b"a" * 32, b"b" * 32, is_server=True)
    with suppress(TamperedError):
        frame_length(data[:4])
        session.open(data[4:])


def frames() -> Sequence[bytes]:
    session = SignedSession(b"secret", b"a" * 32, b"b" * 32, is_server=False)
    return [session.seal({"join": {"job": "a", "node": n}}) for n in range(3)] + [pickle.dumps([1, 2, 3])]


def greet(data: bytes) -> None:
    handshake = ClientHandshake("rendezvous", b"secret", "name")
    with suppress(TamperedError):
        handshake.hello(data[:GREETING_BYTES])
        handshake.session(data[GREETING_BYTES:])


def greetings() -> Sequence[bytes]:
    return [MAGIC + bytes(NONCE_BYTES) + answer + bytes(MAC_BYTES) for answer in (WELCOME, REFUSED)]


FORMATS = dict(document_files.every_format().values())
TARGETS: tuple[Target, ...] = (
    *(reader(name, data) for name, data in FORMATS.items()),
    Target("recipe", recipe_examples, lambda data: refuses(lambda: parse_recipe(data.decode("utf-8", "replace")))),
    Target("tokenizer.json", lambda: [tokenizer_json()], load_tokenizer),
    Target("checkpoint metadata", lambda: [metadata()], read_checkpoint),
    Target("Hugging Face config", lambda: [CONFIG], lambda data: load_weights(data, safetensors())),
    Target("safetensors", lambda: [safetensors()], lambda data: load_weights(CONFIG, data)),
    Target("token store", lambda: [STORE.encode()], open_store),
    Target("record", record_examples, read_record),
    Target("record index", index_examples, read_index),
    Target("state in memory", lambda: [b'{"step": 1, "lineage": [], "hash": "0", "state": {}}'], read_slot),
    Target("routes of the page", lambda: [route.encode() for route in ROUTES], ask),
    Target("frames", frames, open_frame),
    Target("greetings", greetings, greet),
    Target("ssh address", lambda: [b"ssh://me@host:22/a/b", b"ssh://[::1]/x%20y"],
           lambda data: refuses(lambda: parse_address(data.decode("utf-8", "replace")))),
)  # fmt: skip
