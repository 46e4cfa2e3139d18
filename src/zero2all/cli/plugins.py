"""z2a plugins"""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.cli.conventions import Json, Result, command


@dataclass(frozen=True)
class ListedPlugin:
    kind: str
    name: str
    key: str
    """The key of the recipe that names it."""
    distribution: str
    version: str
    place: str | None
    """``module:attribute``; None for a built-in one."""


@command
def plugins(json: Json = False) -> Result:
    """List the plugins that a recipe can name.

    Installed ones are listed by their entry points and not imported. With --json, built-in ones have an entry each.

    Example: z2a plugins
    """
    from zero2all import __version__
    from zero2all.base.plugins import KINDS, builtin_names, installed

    theirs, ours, lines = [], [], []
    for kind, about in KINDS.items():
        for name, entry in sorted(installed(kind).items()):
            version, distribution = (entry.dist.version, entry.dist.name) if entry.dist is not None else ("", "")
            theirs.append(ListedPlugin(kind, name, about.key, distribution, version, entry.value))
        names = sorted(builtin_names(kind))
        ours += [ListedPlugin(kind, name, about.key, "zero2all", __version__, None) for name in names]
        lines.append(f"  {kind:<10} {about.key:<28} {', '.join(names) or 'none'}")
    shown = [f"  {one.kind:<10} {one.name:<28} {one.distribution} {one.version}  {one.place}" for one in theirs]
    text = "\n".join(["installed:", *(shown or ["  none"]), "built in, with the key that names them:", *lines])
    return Result({"plugins": [*theirs, *ours]}, text)
