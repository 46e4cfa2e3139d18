"""The page of built-in plugins: names, options and descriptions, from their registrations."""

from __future__ import annotations

from reference_generator.markdown import first_paragraph, page, prose, table, value_text
from zero2all.base.plugins import KINDS, Plugin, builtin, builtin_names

PLUGINS_INTRODUCTION = """\
What the recipe names can be built in, installed or in a module of your own: see [plugins](../how-to/extend/plugins.md).
`z2a plugins` lists the installed ones."""


def plugins_page() -> str:
    parts = [PLUGINS_INTRODUCTION]
    for kind, about in KINDS.items():
        parts += [f"## {kind.capitalize()}", f"Key of the recipe: `{about.key}`.", plugin_table(kind)]
    return page("Plugin reference", *parts)


def plugin_table(kind: str) -> str:
    rows = ((f"`{one.name}`", options_text(one), prose(first_paragraph(one.help))) for one in builtin(kind))
    return table(["Name", "Options", "Description"], sorted(rows)) if builtin_names(kind) else "There are none."


def options_text(plugin: Plugin) -> str:
    fields = plugin.options.model_fields.items()
    return ", ".join(
        f"`{name}`" if info.is_required() else f"`{name}: {' '.join(value_text(info.default).split())}`"
        for name, info in fields
    )
