"""Rules of structure that hold for the whole package, so that it stays readable after another 20 features."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import zero2all

ROOT = Path(__file__).parents[1]
SOURCE = Path(zero2all.__file__).parent
MAX_FILE_LINES, MAX_METHODS, MAX_ATTRIBUTES, MAX_PARAMETERS, MAX_SAME_NAME = 400, 20, 15, 7, 3
MAX_TRAINER_LINES, MAX_STEP_LINES, MAX_STEP_FILES = 300, 60, 8

LONG_FILES = {"base/torch_private.py": "every private API of torch is in one file, to be read before an upgrade"}
LARGE_CLASSES = {"tokenizer/tokenizer.py:Tokenizer": "the public API of a tokenizer: most methods are short properties"}
LONG_SIGNATURES = {
    "tokenizer/word_table.py:count_texts": "compiled by numba, which takes no records",
    "tokenizer/pair_index.py:apply_changes": "compiled by numba, which takes no records",
    "parallel/ring_attention.py:_backward": "an operator of torch, whose schema has no records",
    "parallel/ring_attention.py:_": "the shapes of that operator",
    "model/ops/document_attention.py:_backward": "an operator of torch, whose schema has no records",
    "model/ops/document_attention.py:_backward_segments": "called by that operator with what it gets",
    "model/ops/document_attention.py:_": "the shapes of that operator",
    "parallel/parallel_model.py:__init__": "options by keyword, each with a default but the seed",
}
POSITIONAL_BOOLEANS = {
    "base/paths.py:unlink": "overrides pathlib",
    "base/paths.py:mkdir": "overrides pathlib",
    "checkpoint/dcp_reader.py:set_up_storage_reader": "overrides torch",
    "parallel/gradient_sync.py:backward_maybe_with_nosync": "overrides torch",
    "parallel/activation_offload.py:_run": "precedes the positional arguments of a forward",
    "model/ops/chunked_loss.py:_forward": "an operator of torch",
    "model/ops/chunked_loss.py:_": "the shapes of that operator",
    "tokenizer/pretokenizer.py:contraction_end": "compiled by numba, which takes no keyword-only arguments",
    "tokenizer/pretokenizer.py:whitespace_end": "compiled by numba, which takes no keyword-only arguments",
    "tokenizer/template_child.py:whole": "called with the list of a message",
    "corpus/dedup/exact.py:_digest": "called by map over two columns",
    "corpus/validation_split.py:write_cut_part": "called by run_tasks with a tuple",
    "experiments/tune.py:measure": "a Callable, which has positional parameters only",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}


def nodes(kind: type) -> Iterator[tuple[str, ast.AST]]:
    return ((name, node) for name, tree in modules().items() for node in ast.walk(tree) if isinstance(node, kind))


def test_public_class_names_are_unique() -> None:
    found = defaultdict(list)
    for name, node in nodes(ast.ClassDef):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[node.name].append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_file_name_is_in_many_packages() -> None:
    counts = Counter(name.rpartition("/")[2] for name in modules())
    assert {name for name, count in counts.items() if count > MAX_SAME_NAME} <= {"__init__.py", "manifest.py"}


def test_files_are_short() -> None:
    lines = {name: len((SOURCE / name).read_text("utf-8").splitlines()) for name in modules()}
    assert {name for name, count in lines.items() if count > MAX_FILE_LINES} == {*LONG_FILES}


def is_record(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(one) for one in node.decorator_list]
    bases = {ast.unparse(one) for one in node.bases}
    return any(one.startswith("dataclass") for one in decorators) or bool(bases & {"Section", "BaseModel"})


def attributes(methods: list[Function]) -> set[str]:
    """What is assigned through self."""
    stores = (one for method in methods for one in ast.walk(method) if isinstance(one, ast.Attribute))
    return {
        one.attr
        for one in stores
        if isinstance(one.ctx, ast.Store) and isinstance(one.value, ast.Name) and one.value.id == "self"
    }


def test_classes_are_small() -> None:
    found = set()
    for name, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        methods = [one for one in node.body if isinstance(one, Function)]
        if not is_record(node) and (len(methods) > MAX_METHODS or len(attributes(methods)) > MAX_ATTRIBUTES):
            found.add(f"{name}:{node.name}")
    assert found == {*LARGE_CLASSES}


def test_functions_have_few_parameters() -> None:
    """Except commands, whose parameters are the options."""
    found = set()
    for name, node in nodes(Function):
        assert isinstance(node, Function)
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(one.arg not in ("self", "cls") for one in given)
        if count > MAX_PARAMETERS and not name.startswith("cli/"):
            found.add(f"{name}:{node.name}")
    assert found == {*LONG_SIGNATURES}


def is_boolean(parameter: ast.arg, default: ast.expr | None) -> bool:
    has_default = isinstance(default, ast.Constant) and isinstance(default.value, bool)
    return has_default or (parameter.annotation is not None and ast.unparse(parameter.annotation) == "bool")


def test_booleans_are_passed_by_name() -> None:
    """Except the options of commands."""
    found = set()
    for name, node in nodes(Function):
        assert isinstance(node, Function)
        parameters = [*node.args.posonlyargs, *node.args.args]
        defaults = [*[None] * (len(parameters) - len(node.args.defaults)), *node.args.defaults]
        if not name.startswith("cli/") and any(map(is_boolean, parameters, defaults)):
            found.add(f"{name}:{node.name}")
    assert found == {*POSITIONAL_BOOLEANS}


def test_only_tables_are_laid_out_by_hand() -> None:
    """The formatter writes everything else, so that a layout is no decision. A table ends with a bracket alone."""
    lines = ((name, line) for name in modules() for line in (SOURCE / name).read_text("utf-8").splitlines())
    assert [
        one for one in lines if re.search(r"# fmt: (skip|off)", one[1]) and not re.match(r"[])}]+  #", one[1])
    ] == []


def test_the_training_loop_and_the_step_are_short() -> None:
    assert len((SOURCE / "train/trainer.py").read_text("utf-8").splitlines()) <= MAX_TRAINER_LINES
    text = (SOURCE / "train/step.py").read_text("utf-8")
    [step] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "TrainStep"]
    halves = [
        one for one in step.body if isinstance(one, Function) and one.name in ("compute_gradients", "update_weights")
    ]
    assert sum((one.end_lineno or 0) - one.lineno + 1 for one in halves) <= MAX_STEP_LINES


@pytest.mark.parametrize("page", ["read-the-code.md", "read-the-code.zh-CN.md"])
def test_the_files_to_read_exist_and_are_short(page: str) -> None:
    text = (ROOT / "docs" / "contribute" / page).read_text("utf-8")
    files = re.findall(r"^(?:\d\.|-) `([\w/]+\.py)`", text, flags=re.MULTILINE)
    step = re.findall(r"^\d\. `([\w/]+\.py)`", text, flags=re.MULTILINE)
    assert len(step) == MAX_STEP_FILES
    assert [name for name in files if name not in modules() or name in LONG_FILES] == []


def test_exceptions_are_needed() -> None:
    for names in (LONG_FILES, LARGE_CLASSES, LONG_SIGNATURES, POSITIONAL_BOOLEANS):
        assert {name.partition(":")[0] for name in names} <= {*modules()}
