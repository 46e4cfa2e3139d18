"""Files of a model directory that are no regular files, or not what they should be: errors, not hangs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.evals.target import find_target
from zero2all.model import Z2all
from zero2all.model.hf import export_hf
from zero2all.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def good(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "good"
    shutil.copytree(workspace / "tokenizer", directory)
    (directory / "manifest.json").unlink(missing_ok=True)
    vocab_size = Tokenizer(directory).vocab_size
    model = Z2all(tiny_recipe(workspace).model.model_copy(update={"vocab_size": vocab_size}))
    model.init_weights(0)
    export_hf(model, directory)
    return directory


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return change


FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
         "model.safetensors"]  # fmt: skip
CASES = {
    **{f"pipe as {name}": replaced(name, os.mkfifo) for name in FILES},
    **{f"directory as {name}": replaced(name, Path.mkdir) for name in FILES},
    **{f"device as {name}": replaced(name, lambda path: path.symlink_to("/dev/zero")) for name in FILES},
    **{
        f"list as {name}": replaced(name, lambda path: path.write_text("[1]"))
        for name in ("config.json", "tokenizer_config.json", "generation_config.json")
    },
    "large template": replaced("chat_template.jinja", lambda path: path.write_text("{{ 1 }}" * 3_000_000)),
    "binary template": replaced("chat_template.jinja", lambda path: path.write_bytes(b"\xff\xfe")),
    "large config": replaced("config.json", lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40)),
}


@pytest.mark.timeout(300)  # with the workspace, on a busy machine
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_file_is_an_error_that_names_it(good: Path, tmp_path: Path, case: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(good, directory)
    CASES[case](directory)
    with pytest.raises(Z2aError) as raised:
        find_target(str(directory)).load_merged_model()
    name = (
        case.rpartition(" ")[2] if " as " in case else {"config": "config.json"}.get(case.split()[1], "chat_template")
    )
    assert name in str(raised.value)


def test_the_directory_without_them_loads(good: Path) -> None:
    assert json.loads((good / "config.json").read_text())
    assert find_target(str(good)).load_merged_model().config.vocab_size
