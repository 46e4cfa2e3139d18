"""Every dependency has bounds and a licence that a user of an Apache-2.0 project can live with."""

import pytest
from packaging.requirements import Requirement

from tests.supply_chain import Package, declared, is_allowed, packages, sbom, without_bounds


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    assert len(declared()) > 40
    assert without_bounds(declared()) == []


def test_a_missing_bound_is_found() -> None:
    lines = ["a", "b>=1", "c<2", "d>=1,<2", "e==1", "f~=1.2", "g!=3"]
    assert without_bounds([Requirement(line) for line in lines]) == ["a", "b>=1", "c<2", "g!=3"]


def test_every_installed_package_has_an_allowed_licence() -> None:
    found = packages()
    assert {"torch", "numpy", "markupsafe"} <= {one.name for one in found}, "those of dependencies too"
    assert [f"{one.name}: {one.licence}" for one in found if not is_allowed(one.licence)] == []
    components = sbom(found)["components"]
    assert isinstance(components, list)
    assert len(components) == len(found)


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("GPL-2.0-only OR MIT", True),
        ("GPL-2.0-only AND MIT", False),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("MPL-2.0 AND (AGPL-3.0-only OR LGPL-3.0-only)", False),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("", False),
        ("something of our own; ask us", False),
        ("Proprietary", False),
    ],
)
def test_expressions_are_evaluated(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) == allowed


def test_a_package_is_named_as_scanners_name_it() -> None:
    assert Package("torch", "2.13.0", "BSD-3-Clause", True).purl == "pkg:pypi/torch@2.13.0"
