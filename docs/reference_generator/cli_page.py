"""The command-line page: every command and flag, from the functions behind the commands.

The functions and not the parsed commands, because typer keeps types and defaults differently in every version.
"""

from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from reference_generator.catalogue import Say, english
from reference_generator.markdown import code, first_paragraph, page, paragraphs, prose, table, value_text
from zero2all.cli.main import PANELS, app

CLI_INTRODUCTION = """\
`z2a COMMAND --help` prints the same for one command. Logs and progress go to stderr, results to stdout. With `--json`,
stdout has exactly one JSON object, even when the command fails; it then has the keys `error` and `problems`.
`KEY=VALUE` arguments override recipe keys; see the [recipe reference](recipe.md)."""
EXIT_CODES = [
    ("0", "The command succeeded."),
    ("1", "The command failed, a check did not pass, or the command was interrupted (Ctrl-C, SIGTERM)."),
    ("2", "The command line or the recipe is wrong."),
]
COMMON_OPTIONS = [  # Typer adds them
    ("`-h`, `--help`", "flag", "", "Print the help of any command and exit."),
    ("`--install-completion`", "flag", "", "Install completion for the current shell."),
    ("`--show-completion`", "flag", "", "Print the completion script of the current shell."),
]
OPTION_HEADS = ["Option", "Type", "Default", "Description"]


class Parameter(NamedTuple):
    """A parameter of the function behind a command."""

    name: str
    kind: Any
    info: ArgumentInfo | OptionInfo
    default: Any

    @property
    def flags(self) -> list[str]:
        """The names of an option; ``--on/--off`` is one."""
        declared = [self.info.default, *(self.info.param_decls or ())]  # in Annotated, the first name is the default
        return [name for name in declared if isinstance(name, str)] or [f"--{self.name.replace('_', '-')}"]

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def metavar(self) -> str:
        name = self.info.metavar or self.name.upper()
        shown = name if self.required or name.startswith("[") else f"[{name}]"
        return shown + ("..." if get_origin(self.kind) is list and not shown.endswith("...") else "")


def cli_page(say: Say = english) -> str:
    groups = {info.name: info.typer_instance for info in app.registered_groups}
    functions = {info.name: info.callback for info in app.registered_commands}
    parts = [
        say(CLI_INTRODUCTION),
        f"## {say('Exit codes')}",
        table([say("Exit code"), say("Meaning")], ((code, say(text)) for code, text in EXIT_CODES)),
        "## `z2a`",
        say(first_paragraph(app.info.help)),
        code("z2a [OPTIONS] COMMAND [ARGS]..."),
    ]
    assert app.registered_callback is not None
    root = option_rows(parameters(app.registered_callback.callback), say)
    common = [(name, say(kind), default, say(text)) for name, kind, default, text in COMMON_OPTIONS]
    parts.append(table(list(map(say, OPTION_HEADS)), [*root, *common]))
    for panel, names in PANELS.items():
        parts.append(f"## {say(panel)}")
        for name in names:
            if name in groups:
                parts += group_parts(["z2a", name], groups[name], say)
            else:
                parts += command_parts(["z2a", name], functions[name], say)
    return page(say("Command-line reference"), *parts, chinese=say is not english)


def group_parts(words: list[str], group: Any, say: Say) -> list[str]:
    parts = [f"### `{' '.join(words)}`", say(first_paragraph(group.info.help))]
    for info in group.registered_commands:
        parts += command_parts([*words, info.name or info.callback.__name__.replace("_", "-")], info.callback, say)
    for info in group.registered_groups:
        parts += group_parts([*words, info.name], info.typer_instance, say)
    return parts


def command_parts(words: list[str], function: Any, say: Say) -> list[str]:
    given = parameters(function)
    arguments = [one for one in given if isinstance(one.info, ArgumentInfo)]
    required = [
        f"{one.flags[0]} {option_type(one).split()[0].upper()}"
        for one in given
        if one.required and one not in arguments
    ]
    synopsis = [*words, "[OPTIONS]", *required, *(one.metavar for one in arguments)]
    *description, example = paragraphs(function.__doc__)
    return [
        f"{'###' if len(words) == 2 else '####'} `{' '.join(words)}`",
        *map(say, description),
        code(" ".join(synopsis)),
        table(
            [say("Argument"), say("Description")],
            ((f"`{one.metavar}`", argument_help(one, say)) for one in arguments),
        ),
        table(list(map(say, OPTION_HEADS)), option_rows(given, say)),
        say("Example:"),
        example,
    ]


def parameters(function: Any) -> list[Parameter]:
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in signature.parameters.items():
        kind, info = get_args(hints[name])
        kinds = [part for part in get_args(kind) if part is not type(None)]
        is_optional = get_origin(kind) in (Union, types.UnionType)
        found.append(Parameter(name, kinds[0] if is_optional else kind, info, parameter.default))
    return found


def argument_help(argument: Parameter, say: Say) -> str:
    has_default = not argument.required and argument.default is not None
    default = say(" Default: `{}`.").format(argument.default) if has_default else ""
    return say(prose(argument.info.help or "")) + default


def option_rows(given: list[Parameter], say: Say) -> list[tuple[str, str, str, str]]:
    return [
        (
            ", ".join(f"`{flag}`" for declared in one.flags for flag in declared.split("/")),
            f"`{kind}`" if isinstance(one.kind, type(Literal["a"])) else kind,
            option_default(one, say),
            say(prose(one.info.help or "")),
        )
        for one in given
        if isinstance(one.info, OptionInfo)
        for kind in [option_type(one, say)]
    ]


def option_type(option: Parameter, say: Say = english) -> str:
    kind = option.kind
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    name = {bool: "flag", int: "integer", float: "number", str: "text", Path: "path"}[kind]
    limits = [
        f"{sign} {limit:g}" for sign, limit in (("≥", option.info.min), ("≤", option.info.max)) if limit is not None
    ]
    return " ".join([say(name), say(" and ").join(limits)]).rstrip()


def option_default(option: Parameter, say: Say) -> str:
    if option.required:
        return say("required")
    if isinstance(option.default, bool):
        names = option.flags[0].split("/")
        return f"`{names[0 if option.default else 1]}`" if len(names) > 1 else ""
    return "" if option.default in (None, "") else f"`{value_text(option.default)}`"
