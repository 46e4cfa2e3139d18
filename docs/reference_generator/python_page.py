"""The Python page: the names that packages export, from the source, which is parsed and not imported."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zero2all
from reference_generator.markdown import code, first_paragraph, heading_link, page, paragraphs
from reference_generator.recipe_page import sections
from zero2all.recipe import Recipe

SOURCE = Path(zero2all.__file__).parents[1]
PACKAGES = (
    "zero2all", "zero2all.recipe", "zero2all.corpus", "zero2all.tokenizer", "zero2all.tokens", "zero2all.model",
    "zero2all.parallel", "zero2all.train", "zero2all.checkpoint", "zero2all.cluster.launch", "zero2all.cluster.doctor",
    "zero2all.track", "zero2all.evals", "zero2all.experiments", "zero2all.generation", "zero2all.sandbox",
    "zero2all.storyworld",
)  # fmt: skip
COMMANDS_OF = {"zero2all.cluster.launch": "`z2a launch`", "zero2all.cluster.doctor": "`z2a doctor`"}
MAX_LINE = 100  # characters of a signature or value on one line
PYTHON_INTRODUCTION = """\
The names that each package exports. Import them from the package: `from zero2all.recipe import load_recipe`. Every
other module and name is internal and may change between versions."""


class Found(NamedTuple):
    """A definition, the module that has it, and the docstring in or under it."""

    module: str
    node: ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    docstring: str


def python_page() -> str:
    paths = sorted(sections(Recipe, ""), key=lambda one: len(one[0]), reverse=True)
    section_paths = {section.__name__: path for path, section in paths}  # the shortest path of each
    parts = [PYTHON_INTRODUCTION]
    for package in PACKAGES:
        parts += [f"## `{package}`", *paragraphs(ast.get_docstring(parse(package)) or "")]
        names = exported(package)
        parts += [f"The package exports no names; use {COMMANDS_OF[package]}."] if package in COMMANDS_OF else []
        for name in names:
            parts += definition_parts(name, find(package, name), section_paths)
    return page("Python API reference", *parts)


@functools.cache
def parse(module: str) -> ast.Module:
    path = SOURCE.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8"))


def unparse(node: ast.AST) -> str:
    """The source of a node, with the quotes of the project's style."""
    text = ast.unparse(node)
    return text if '"' in text else text.replace("'", '"')


def exported(package: str) -> list[str]:
    """The names in ``__all__``, without regard to case."""
    for node in parse(package).body:
        if isinstance(node, ast.Assign) and unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


def find(module: str, name: str) -> Found:
    """The definition of a name that a module defines or imports."""
    tree = parse(module)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Found(module, node, ast.get_docstring(node) or "")
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in (unparse(one) for one in targets(node)):
            return Found(module, node, docstring_under(after))
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and name in (alias.name for alias in imported.names):
            return find(str(imported.module), name)
    raise LookupError(f"{module} has no {name}")


def targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def docstring_under(node: ast.stmt | None) -> str:
    """The docstring of an attribute, which is the statement after it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def definition_parts(name: str, found: Found, section_paths: dict[str, str]) -> list[str]:
    node, is_section = found.node, name in section_paths or name == "Recipe"
    if isinstance(node, ast.FunctionDef):
        context = "@contextmanager\n" if "contextmanager" in decorators(node) else ""
        signature = call(f"{context}def {name}", arguments_of(node), node.returns)
    elif isinstance(node, ast.ClassDef):
        signature = f"class {name}" if is_section else call(f"class {name}", constructor(found))
    else:
        signature = constant(node)
    summary, *rest = paragraphs(found.docstring)
    examples = [block for block in rest if block.startswith("```")]
    parts = [f"### `{name}`", code(signature, "python"), summary, *examples]
    if path := section_paths.get(name):
        parts.append(f"Its fields are the keys of {heading_link(path, 'recipe.md')}.")
    elif name == "Recipe":
        parts.append("Its fields are the [top-level keys](recipe.md#top-level).")
    elif isinstance(node, ast.ClassDef):
        parts.append("\n".join(f"- {line}" for line in members(node)))
    return parts


def constant(node: ast.Assign | ast.AnnAssign) -> str:
    name = unparse(targets(node)[0])
    if isinstance(node, ast.AnnAssign):
        return f"{name}: {unparse(node.annotation)}"
    value = unparse(node.value)
    return f"{name} = {value if len(value) <= MAX_LINE else '...'}"


def call(name: str, arguments: list[str], returns: ast.expr | None = None) -> str:
    end = f" -> {unparse(returns)}" if returns is not None else ""
    line = f"{name}({', '.join(arguments)}){end}"
    if len(line) <= MAX_LINE:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){end}"])


def arguments_of(function: ast.FunctionDef, is_method: bool = False) -> list[str]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    texts = [argument(one, default) for one, default in zip(positional, defaults, strict=True)]
    if given.vararg or given.kwonlyargs:
        texts.append(f"*{argument(given.vararg, None) if given.vararg else ''}")
    texts += [argument(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    texts += [f"**{argument(given.kwarg, None)}"] if given.kwarg else []
    return texts[1:] if is_method else texts


def argument(given: ast.arg, default: ast.expr | None) -> str:
    text = unparse(given)
    return text if default is None else f"{text} = {default_text(default)}"


def default_text(default: ast.expr) -> str:
    """The default of an argument; what only the source can explain is left out."""
    text = unparse(default)
    return "..." if text.startswith(("_", "lambda", "field(")) else text


def decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    return {unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list}


def constructor(found: Found) -> list[str]:
    """The arguments of ``__init__``, or the fields of a dataclass and its bases."""
    node = found.node
    assert isinstance(node, ast.ClassDef)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            return arguments_of(method, is_method=True)
    if "dataclass" not in decorators(node):
        return []
    inherited = [field for base in node.bases for field in constructor(find(found.module, unparse(base)))]
    fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
    return inherited + [argument(ast.arg(unparse(one.target), one.annotation), one.value) for one in fields]


def members(node: ast.ClassDef) -> Iterator[str]:
    """Attributes that have a docstring, public properties and methods, in the order of the source."""
    for member, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and (text := docstring_under(after)):
            yield f"`{unparse(member.target)}: {unparse(member.annotation)}`: {first_paragraph(text)}"
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_"):
            continue
        text = first_paragraph(ast.get_docstring(member))
        if decorators(member) & {"property", "cached_property"}:
            shown = f"{member.name}: {unparse(member.returns) if member.returns else 'Any'}"
        else:
            arguments = arguments_of(member, is_method="staticmethod" not in decorators(member))
            prefix = f"{node.name}." if decorators(member) & {"classmethod", "staticmethod"} else ""
            end = f" -> {unparse(member.returns)}" if member.returns else ""
            shown = f"{prefix}{member.name}({', '.join(arguments)}){end}"
        yield f"`{shown}`" + (f": {text}" if text else "")
