"""What zero2all is installed with: a bill of materials in CycloneDX, and a check of the licences.

    python -m tests.supply_chain > sbom.json        # exit 1 if a licence is not on the list below

Of every package that the dependencies in pyproject.toml lead to and that is installed here, extras included.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# Permissive, and the Mozilla licence, which binds changes to its own files alone.
ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Unlicense", "Zlib",
}  # fmt: skip
# How packages without an SPDX expression call them.
NAMES = {
    "Apache": "Apache-2.0", "Apache 2.0": "Apache-2.0", "Apache 2.0 License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0", "BSD": "BSD-3-Clause", "BSD License": "BSD-3-Clause",
    "BSD 2-Clause License": "BSD-2-Clause", "3-Clause BSD License": "BSD-3-Clause", "CC0": "CC0-1.0",
    "ISC License (ISCL)": "ISC", "ISC License": "ISC", "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "MPL-2.0 and MIT and BSD-3-Clause": "MPL-2.0 AND MIT AND BSD-3-Clause",
}  # fmt: skip
# Packages whose metadata name no licence: what their repository says.
KNOWN = {"torchao": "BSD-3-Clause", "python-dateutil": "Apache-2.0 OR BSD-3-Clause"}


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str
    """An SPDX expression where it can be found out, else what the package says, or nothing."""
    direct: bool
    """Whether pyproject.toml names it."""

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def declared() -> list[Requirement]:
    """Every requirement of pyproject.toml: of the core, of all extras and of the build."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = found["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    requirements = [
        Requirement(line) for line in [*project["dependencies"], *extras, *found["build-system"]["requires"]]
    ]
    return [one for one in requirements if canonicalize_name(one.name) != "zero2all"]


def without_bounds(requirements: Sequence[Requirement]) -> list[str]:
    """Those that lack a lower or an upper bound: a new major version would come in unseen."""
    operators = {str(one): {part.operator for part in one.specifier} for one in requirements}
    return [
        line for line, used in operators.items()
        if not (used & {"==", "==="} or (used & {">=", ">", "~="} and used & {"<", "<=", "~="}))
    ]  # fmt: skip


def packages() -> list[Package]:
    installed = {canonicalize_name(one.metadata["Name"]): one for one in distributions()}
    direct = {canonicalize_name(one.name) for one in declared()}
    wanted = [*declared()]
    seen: dict[str, Package] = {}
    visited: set[tuple[str, str]] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name not in installed:
            continue  # of another system or Python, or an extra that was left out
        for extra in ["", *requirement.extras]:
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            wanted += _requirements(installed[name], extra)
        found = installed[name]
        seen[name] = Package(name, found.version, licence_of(found), name in direct)
    return [seen[name] for name in sorted(seen)]


def _requirements(found: Distribution, extra: str) -> Iterator[Requirement]:
    for line in found.requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def licence_of(found: Distribution) -> str:
    metadata = found.metadata
    name = canonicalize_name(metadata["Name"])
    if name in KNOWN:
        return KNOWN[name]
    if expression := metadata.get("License-Expression"):
        return str(expression)
    stated = (metadata.get("License") or "").strip().split("\n")[0]  # the name, and then perhaps the whole text
    if stated and is_allowed(NAMES.get(stated, stated)):
        return NAMES.get(stated, stated)
    classifiers = [
        line.split(" :: ")[-1] for line in metadata.get_all("Classifier", []) if line.startswith("License ::")
    ]
    named = [NAMES.get(line, line) for line in classifiers if line not in ("OSI Approved", "DFSG approved")]
    return " OR ".join(named) or stated


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression can be met with the licences of the list."""
    words = re.sub(r"([\w.+-]+ WITH [\w.+-]+|[\w.+-]+)", _as_truth, expression)
    if not re.fullmatch(r"(?:[01&|() ])+", words):
        return False
    return bool(words.strip()) and _evaluate(words.replace(" ", ""))


def _as_truth(found: re.Match[str]) -> str:
    word = found[0]
    return {"AND": "&", "OR": "|"}.get(word, "1" if word in ALLOWED else "0")


def _evaluate(words: str) -> bool:
    """Of 0, 1, &, | and brackets; & binds closer."""
    while "(" in words:
        inner = re.search(r"\(([01&|]+)\)", words)
        if inner is None:
            return False
        words = words[: inner.start()] + str(int(_evaluate(inner[1]))) + words[inner.end() :]
    return any(all(part == "1" for part in side.split("&")) for side in words.split("|"))


def sbom(found: Sequence[Package]) -> dict[str, object]:
    component = {"type": "library", "name": "zero2all", "version": distribution("zero2all").version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component},
        "components": [
            {
                "type": "library", "name": one.name, "version": one.version, "purl": one.purl, "bom-ref": one.purl,
                "scope": "required" if one.direct else "optional",
                "licenses": [{"expression": one.licence}],
            }
            for one in found
        ],
    }  # fmt: skip


def main() -> None:
    found = packages()
    sys.stdout.write(json.dumps(sbom(found), indent=2) + "\n")
    refused = [
        f"{one.name} {one.version}: {one.licence or 'no licence named'}" for one in found if not is_allowed(one.licence)
    ]
    sys.stderr.write(f"{len(found)} packages, {len(refused)} with a licence that is not on the list\n")
    for line in refused:
        sys.stderr.write(f"  {line}\n")
    sys.exit(bool(refused))


if __name__ == "__main__":
    main()
