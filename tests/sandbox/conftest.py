from __future__ import annotations

import pytest

from zero2all.base.errors import Z2aError
from zero2all.sandbox import Limits, Sandbox
from zero2all.sandbox.sandbox import BackendName

LIMITS = Limits(seconds=20, memory=256 * 2**20, processes=8, disk=16 * 2**20)
BACKENDS: tuple[BackendName, ...] = ("sandlock", "bubblewrap")


def problem(name: BackendName) -> str:
    """Why a backend does not work here; empty if it does."""
    try:
        Sandbox(name).run_python("pass")
    except (Z2aError, OSError) as error:
        return f"{name} does not work here: {error}"
    return ""


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> BackendName:
    name: BackendName = request.param
    if reason := problem(name):
        pytest.skip(reason)
    return name


@pytest.fixture
def sandbox(backend: BackendName) -> Sandbox:
    return Sandbox(backend, LIMITS)


@pytest.fixture(scope="session")
def any_sandbox() -> Sandbox:
    """Whatever works here, for what does not depend on the backend."""
    for name in reversed(BACKENDS):
        if not problem(name):
            return Sandbox(name, LIMITS)
    pytest.skip("no sandbox works here")
