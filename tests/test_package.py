"""What is built from this checkout: its metadata, its files, and that it works away from the repository."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DEMO_MESSAGES = "Tell me a story about Mia.\n/reset\n给我讲一个小兔的故事。\n"
FEW_STEPS = [
    "train.steps=2", "train.batch_tokens=256", "train.seq_len=64", "train.device=cpu", "tokenizer.vocab_size=512",
    "model.num_hidden_layers=1", "model.hidden_size=32", "model.intermediate_size=64", "model.num_attention_heads=2",
    "model.num_key_value_heads=2", "checkpoint.flash_every=null", "evals.tokens=512",
    "tokenizer.trainer=sentencepiece-bpe",  # has nothing to compile for the first run in a new directory
]  # fmt: skip
NEEDS_ADDRESS = "Url,AuthorEmail"  # what pyroma misses as long as the project has no public address


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a wheel and an sdist."""
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "hatchling", "build", "-d", str(out), cwd=ROOT)
    return out


def _run(*command: str, cwd: Path, stdin: str = "") -> str:
    done = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


def test_the_distributions_pass_the_checks_of_package_indexes(dist: Path) -> None:
    files = [str(path) for path in dist.iterdir()]
    assert len(files) == 2
    _run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=dist)
    _run(sys.executable, "-m", "check_wheel_contents", str(_wheel(dist)), cwd=dist)
    _run(sys.executable, "-m", "validate_pyproject", "pyproject.toml", cwd=ROOT)
    _run(sys.executable, "-m", "pyroma", "--min=10", f"--skip-tests={NEEDS_ADDRESS}", "--directory", ".", cwd=ROOT)


def test_the_wheel_contains_every_file_of_the_package_and_the_recipes(dist: Path) -> None:
    package, recipes = ROOT / "src" / "zero2all", ROOT / "recipes"
    expected = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    expected |= {f"zero2all/{path.relative_to(ROOT).as_posix()}" for path in recipes.rglob("*") if path.is_file()}
    with zipfile.ZipFile(_wheel(dist)) as file:
        found = {name for name in file.namelist() if ".dist-info/" not in name}
    assert found == {name for name in expected if "__pycache__" not in name}


def test_without_a_public_address_there_are_no_urls(dist: Path) -> None:
    metadata = _metadata(_wheel(dist))
    assert metadata["Author"] == "zero2all contributors"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") is None
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def _hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_public_address_makes_links_absolute_and_fills_the_urls(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "![the page](docs/a.png) [docs](docs/a.md#part) [here](#part) [away](https://example.com/x)\n"
        '[![badge](docs/b.svg)](docs/b.md) <img src="docs/c.png"> <a href="LICENSE">x</a> <a href="mailto:x@y.z">x</a>'
    )
    config = {"repository": "https://example.org/our/zero2all/"}
    metadata = {"name": "zero2all", "version": "1.2"}
    _hook().PublishedMetadata(str(tmp_path), config).update(metadata)
    raw, blob = (f"https://example.org/our/zero2all/{kind}/v1.2" for kind in ("raw", "blob"))
    assert metadata["readme"]["text"] == (
        f"![the page]({raw}/docs/a.png) [docs]({blob}/docs/a.md#part) [here](#part) [away](https://example.com/x)\n"
        f'[![badge]({raw}/docs/b.svg)]({blob}/docs/b.md) <img src="{raw}/docs/c.png"> <a href="{blob}/LICENSE">x</a> '
        '<a href="mailto:x@y.z">x</a>'
    )
    assert metadata["urls"]["Repository"] == "https://example.org/our/zero2all"
    assert metadata["urls"]["Changelog"] == f"{blob}/CHANGELOG.md"


def test_no_link_of_the_readme_stays_relative_with_a_public_address() -> None:
    metadata = {"name": "zero2all", "version": "1.2"}
    _hook().PublishedMetadata(str(ROOT), {"repository": "https://example.org/z"}).update(metadata)
    text = metadata["readme"]["text"]
    targets = re.findall(
        r"\]\(([^)\s]+)|(?:src|srcset|href)=\"([^\"\s]+)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
    )
    found = [one or other for one, other in targets]
    assert len(found) > 10
    assert [target for target in found if not target.startswith(("https://", "http://", "#", "mailto:"))] == []
    assert all((ROOT / page).exists() for page in _hook().PAGES.values())


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the commands of a venv with the wheel, and with the dependencies that are installed here."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", str(venv), cwd=venv.parent)
    purelib = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "--no-deps", "--no-index"]
    _run(*pip, "--quiet", str(_wheel(dist)), cwd=venv.parent)
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (purelib / "dependencies.pth").write_text("\n".join(others))
    return venv / "bin"


@pytest.mark.slow
def test_the_wheel_trains_and_answers_away_from_the_repository(installed: Path, tmp_path: Path) -> None:
    z2a, purelib = str(installed / "z2a"), str(installed.parent / "lib")
    where = _run(str(installed / "python"), "-c", "import zero2all; print(zero2all.__file__)", cwd=tmp_path)
    assert where.startswith(purelib)
    english, chinese = _run(z2a, "chat", "--demo", "temperature=0", cwd=tmp_path, stdin=DEMO_MESSAGES).splitlines()
    assert "Mia" in english
    assert chinese.endswith("。")
    text = [
        f"Line {number} of a text that is about {number * 7} things, and about nothing else." for number in range(900)
    ]
    (tmp_path / "text.txt").write_text("\n".join(text))
    _run(z2a, "quickstart", "--out", "first", "--corpus", "text.txt", "corpus.filters=[]", *FEW_STEPS, cwd=tmp_path)
    assert _run(z2a, "chat", "first", "max_tokens=8", cwd=tmp_path, stdin="Hello\n")


@pytest.mark.long
def test_the_wheel_is_installed_with_its_dependencies_and_works(dist: Path, tmp_path: Path) -> None:
    _run(sys.executable, "-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    python, z2a = str(tmp_path / "venv" / "bin" / "python"), str(tmp_path / "venv" / "bin" / "z2a")
    _run(python, "-m", "pip", "install", "--quiet", f"torch=={version('torch').partition('+')[0]}", cwd=tmp_path)
    _run(python, "-m", "pip", "install", "--quiet", str(_wheel(dist)), cwd=tmp_path)
    started = time.monotonic()
    english, chinese = _run(z2a, "chat", "--demo", "temperature=0", cwd=tmp_path, stdin=DEMO_MESSAGES).splitlines()
    assert time.monotonic() - started < 30
    assert "Mia" in english
    assert chinese.endswith("。")
    _run(z2a, "quickstart", "--out", "first", "train.steps=2", "evals.stories=0", cwd=tmp_path)
    assert _run(z2a, "chat", "first", "max_tokens=8", cwd=tmp_path, stdin="Hello\n")
