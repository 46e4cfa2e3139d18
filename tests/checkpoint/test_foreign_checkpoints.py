"""Untrusted checkpoints: nothing in them is ever executed, whichever command reads them."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import tracemalloc
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from typer.testing import CliRunner

import zero2all.checkpoint.dcp_reader as reader
from tests.adversarial.payload import Payload
from tests.checkpoint.helpers import TRAINING_STATE
from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.base.io import sha256_file
from zero2all.checkpoint import CheckpointStore, RankGroup
from zero2all.checkpoint.state_dict import training_state_dict
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE
from zero2all.cli.main import app
from zero2all.recipe import Recipe
from zero2all.train import train

EMBEDDING = "model.embed_tokens.weight"


def resign(step: Path) -> None:
    """Whoever writes a checkpoint writes its checksums too."""
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"] = {name: sha256_file(step / name) for name in manifest["files"]}
    manifest["sizes"] = {name: (step / name).stat().st_size for name in manifest["sizes"]}
    (step / "manifest.json").write_text(json.dumps(manifest))


def change(step: Path, edit: Callable[[Any], Any]) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    (step / ".metadata").write_bytes(pickle.dumps(edit(metadata)))
    resign(step)


def add_payload(step: Path, mark: Path) -> None:
    def edit(metadata: Any) -> Any:
        metadata.planner_data = Payload(mark)
        return metadata

    change(step, edit)


def as_bytes(step: Path, name: str, mark: Path) -> None:
    """Declare a weight to be a pickled object, which DCP itself would load with ``weights_only=False``."""
    blob = io.BytesIO()
    torch.save(Payload(mark), blob)
    (step / "__0_0.distcp").write_bytes(blob.getvalue())

    def edit(metadata: Any) -> Any:
        place = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
        place.offset, place.length = 0, len(blob.getvalue())
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data = {MetadataIndex(name): place}
        return metadata

    change(step, edit)


@pytest.fixture(scope="module")
def trained(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    recipe = tiny_recipe(workspace, f"out={tmp_path_factory.mktemp('foreign')}", "train.steps=8")
    train(recipe)
    return recipe


@pytest.fixture
def run(trained: Recipe, tmp_path: Path) -> Path:
    shutil.copytree(trained.run_dir, tmp_path / "out" / "run")
    return tmp_path / "out" / "run"


COMMANDS = {
    "diff": ["ckpt", "diff", "RUN", "4", "8"],
    "eval": ["eval", "loss", "RUN"],
    "chat": ["chat", "RUN", "--prompt", "a", "max_tokens=2"],
    "export": ["export", "RUN", "--to", "RUN/hf"],
    "blame": ["blame", "RUN", "--step", "7"],
}
VERIFY = ["ckpt", "verify", "RUN", "8"]


def z2a(words: list[str], run: Path) -> tuple[int, str]:

    done = CliRunner().invoke(app, [*(word.replace("RUN", str(run)) for word in words), "--json"])
    return done.exit_code, json.loads(done.stdout).get("error", "")


@pytest.mark.parametrize("name", [*COMMANDS, "verify"])
def test_no_command_runs_what_a_checkpoint_brings(name: str, run: Path, tmp_path: Path) -> None:
    command = {**COMMANDS, "verify": VERIFY}[name]
    assert z2a(command, run) == (0, "")
    shutil.rmtree(run / "hf", ignore_errors=True)
    for step in (run / "checkpoints").glob("step-*"):
        add_payload(step, tmp_path / "mark")
    code, error = z2a(command, run)
    assert not (tmp_path / "mark").exists()
    assert code == 1
    assert "/.metadata contains" in error
    assert ".mkdir" in error  # the refused type
    assert "\n" not in error


def test_verify_compares_sizes_with_the_manifest(run: Path, tmp_path: Path) -> None:
    step = run / "checkpoints" / "step-00000008"
    sizes = json.loads((step / "manifest.json").read_text())["sizes"]
    add_payload(step, tmp_path / "mark")
    manifest = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps(manifest | {"sizes": sizes}))
    code, error = z2a(VERIFY, run)
    assert code == 1
    assert re.search(rf"\.metadata has \d+ bytes instead of {sizes['.metadata']}", error)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_unpickles_a_weight(name: str, run: Path, tmp_path: Path) -> None:
    for step in (run / "checkpoints").glob("step-*"):
        as_bytes(step, EMBEDDING, tmp_path / "mark")
    code, error = z2a(COMMANDS[name], run)
    assert not (tmp_path / "mark").exists()
    assert (code, name) in ((1, name), (0, "diff"))  # which compares what both have
    assert "bug" not in error
    assert (EMBEDDING.removeprefix("model.") in error) == (name != "diff")
    assert "\n" not in error


@pytest.mark.parametrize("inject", [add_payload, lambda step, mark: as_bytes(step, EMBEDDING, mark)])
def test_training_does_not_resume_from_it(
    inject: Callable[[Path, Path], None], workspace: Path, run: Path, tmp_path: Path
) -> None:
    inject(run / "checkpoints" / "step-00000008", tmp_path / "mark")
    with pytest.raises(Z2aError, match="step-00000008"):
        train(tiny_recipe(workspace, f"out={run.parent}", "train.steps=12"), extend="constant")
    assert not (tmp_path / "mark").exists()


def test_settings_of_an_optimizer_are_not_unpickled_either(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters())]
    checkpoints = CheckpointStore(tmp_path / "checkpoints")
    state = training_state_dict(model, optimizers)
    checkpoints.write(1, state, TRAINING_STATE, UNKNOWN_LINEAGE, RankGroup())
    written = pickle.loads((checkpoints.path(1) / ".metadata").read_bytes())
    assert not [name for name, entry in written.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    # One as DCP writes it, settings included, loads too; their values are not read.
    step = checkpoints.path(2)
    shutil.copytree(checkpoints.path(1), step)
    state["optimizer"]["param_groups.weight.lr"] = Payload(tmp_path / "mark")
    torch.distributed.checkpoint.save(state, storage_writer=FileSystemWriter(step), no_dist=True)
    with torch.no_grad():
        before = model.weight.detach().clone()
        model.weight.zero_()
    checkpoints.load(2, model, optimizers)
    assert torch.equal(model.weight, before)
    assert not (tmp_path / "mark").exists()


def make_checkpoint(directory: Path) -> CheckpointStore:
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    checkpoints = CheckpointStore(directory)
    tensors = training_state_dict(model, [torch.optim.SGD(model.parameters(), momentum=0.9)])
    checkpoints.write(1, tensors, TRAINING_STATE, UNKNOWN_LINEAGE, RankGroup())
    return checkpoints


def test_what_we_read_is_what_dcp_reads(tmp_path: Path) -> None:
    checkpoints = make_checkpoint(tmp_path)
    ours, theirs = checkpoints.reader(1).read_metadata(), FileSystemReader(checkpoints.path(1)).read_metadata()
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, entry in ours.state_dict_metadata.items():
        other = theirs.state_dict_metadata[name]
        assert (entry.size, entry.chunks) == (other.size, other.chunks), name
        # torch 2.15 also writes strides; a checkpoint of 2.13 has none, so they are not read.
        assert vars(entry.properties) | {"strides": None} == vars(other.properties) | {"strides": None}, name
    assert ours.storage_data == theirs.storage_data
    assert ours.version == theirs.version


def read_instead(metadata: bytes, directory: Path, match: str = "") -> None:
    """Reading these metadata of a checkpoint fails."""
    checkpoints = make_checkpoint(directory)
    (checkpoints.path(1) / ".metadata").write_bytes(metadata)
    with pytest.raises(Z2aError, match=match):
        checkpoints.reader(1).read_metadata()


@pytest.mark.parametrize(
    "hostile",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"ctorch.storage\n_load_from_bytes\n(C\x01xtR.",
        b"ctorch\nload\n.",
        b"cbuiltins\ngetattr\n.",
        b"ctorch.serialization\nload\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n.",
        b"ctorch.distributed.checkpoint.filesystem\npickle\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93.",
    ],
)
def test_every_other_name_is_refused_by_its_name(hostile: bytes, tmp_path: Path) -> None:
    module, name = (hostile[1:].split(b"\n")[:2]) if hostile[:1] == b"c" else (b"builtins", b"exec")
    read_instead(hostile, tmp_path, f"{module.decode()}.{name.decode()}")


@pytest.mark.parametrize("damage", [b"", b"\x80\x04", b"N.", b"]\x94.", b"not a pickle", b"(lp0\n.", b"cNone\n\n."])
def test_damaged_metadata_is_one_line_that_names_it(damage: bytes, tmp_path: Path) -> None:
    read_instead(damage, tmp_path, r"step-00000001/\.metadata")


def test_a_pickle_cannot_change_the_classes_it_may_name(tmp_path: Path) -> None:
    """The opcode BUILD sets attributes of whatever is on the stack, a class too."""
    read_instead(b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'version'\nS'hostile'\nstb.", tmp_path)
    assert torch.distributed.checkpoint.metadata.Metadata.version is None


@pytest.mark.parametrize(
    "name",
    [
        b"torch.serialization\n_get_layout",
        b"torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING",
        b"torch\nSize",
    ],
)
def test_a_few_bytes_of_metadata_do_not_keep_a_reader_busy(name: bytes, tmp_path: Path) -> None:
    """A tuple that holds the one before twice: to print it takes twice as long per level."""
    # What comes of the call is dropped; the last tuple stays, so an error that prints it would take as long.
    nested = b"))" + b"".join(b"q\x000h\x00h\x00\x86" for _ in range(22)) + b"q\x01"
    tracemalloc.start()
    try:
        read_instead(b"\x80\x02" + nested + b"0c" + name + b"\nh\x01\x85R.", tmp_path, "is damaged")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


class Counted(tuple[Any, ...]):
    """Counts how often it is printed or hashed."""

    seen = 0

    def __repr__(self) -> str:
        Counted.seen += 1
        return "()"

    def __hash__(self) -> int:
        Counted.seen += 1
        return 0


@pytest.mark.parametrize("place", ["size", "dtype", "name", "index"])
def test_no_error_prints_what_a_checkpoint_holds(place: str, tmp_path: Path) -> None:
    """It may be nested so deep that printing or hashing it never ends."""
    nested = Counted()
    properties, index, info = (reader._InertObject() for _ in range(3))
    properties.attributes = (nested if place == "dtype" else torch.float32,)
    tensor, root = reader._InertObject(), type("Metadata", (reader._InertObject,), {})()
    tensor.attributes = {"properties": properties, "size": (nested,) if place == "size" else (4,), "chunks": []}
    index.attributes = {"fqn": "a", "index": nested if place == "index" else None}
    info.attributes = {"relative_path": "__0_0.distcp", "offset": 0, "length": 1}
    root.attributes = {
        "state_dict_metadata": {nested if place == "name" else "a": tensor},
        "storage_data": {index: info},
    }
    Counted.seen = 0
    with pytest.raises(ValueError, match=r"type|dtype|name|lengths"):
        reader._metadata(root)
    assert Counted.seen == 0


def test_a_weight_is_read_from_the_checkpoint_only(tmp_path: Path) -> None:
    checkpoints = make_checkpoint(tmp_path)

    def edit(metadata: Any) -> Any:
        for info in metadata.storage_data.values():
            info.relative_path = "../other/__0_0.distcp"
        return metadata

    change(checkpoints.path(1), edit)
    with pytest.raises(Z2aError, match=r"\.\./other"):
        checkpoints.reader(1).read_metadata()


@pytest.mark.slow
def test_in_an_object_store_too(s3: str, tmp_path: Path) -> None:
    from zero2all.base.paths import to_path

    checkpoints = make_checkpoint(to_path(f"{s3}/checkpoints"))
    found = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    checkpoints.load_model(1, found)
    hostile = types.SimpleNamespace(payload=Payload(tmp_path / "mark"))
    (tmp_path / "metadata").write_bytes(pickle.dumps(hostile))
    (checkpoints.path(1) / ".metadata").put(tmp_path / "metadata")  # type: ignore[attr-defined]
    with pytest.raises(Z2aError, match=r"\.metadata.*types.SimpleNamespace"):
        checkpoints.load_model(1, found)
    assert not (tmp_path / "mark").exists()
