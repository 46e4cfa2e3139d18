"""Random requests made from the API's own schema: whatever they hold, the server does not fail."""

from __future__ import annotations

import json
import warnings
from typing import Any

import httpx
import pytest

from tests.generation.serve.servers import KEY, Served, wait_until_idle
from zero2all.generation.serve.api_requests import openapi_schema

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
HEADERS = {"Authorization": f"Bearer {KEY}"}


LIMITS = ("max_tokens", "max_completion_tokens")


def run_cases(server: Served, cases: int) -> int:
    """Call every operation with valid and with invalid bodies; the number of calls."""
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(openapi_schema())
    operations = [found for one in schema.get_all_operations() if (found := one.ok()).method == "post"]
    modes, statuses = list(GenerationMode), []
    with httpx.Client(base_url=server.url, headers=HEADERS, trust_env=False, timeout=120) as http:
        for operation in operations:
            for mode in modes:

                @settings(
                    max_examples=cases // len(operations) // len(modes), deadline=None, database=None,
                    derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
                )  # fmt: skip
                @given(case=operation.as_strategy(generation_mode=mode))
                def call(case: schemathesis.Case) -> None:
                    data = json.dumps(shortened(case.body), default=repr).encode("utf-8", "surrogatepass")
                    answer = http.post(case.formatted_path, content=data)
                    statuses.append(answer.status_code)
                    assert answer.status_code < 500, (answer.text[:300], case.body)

                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call()
    wait_until_idle(server.engine)
    assert statuses.count(200) > len(statuses) / 20
    return len(statuses)


def shortened(body: Any) -> Any:
    """A name of a model that nearly always is wrong would hide the rest, and long answers would take hours."""
    if not isinstance(body, dict):
        return None if isinstance(body, schemathesis.core.NotSet) else body
    changed = {name: 2 for name in LIMITS if isinstance(body.get(name), int) and body[name] > 2}
    return {"max_tokens": 2, **body, **changed, **({"model": ""} if isinstance(body.get("model"), str) else {})}


def test_no_random_request_is_a_server_error(server: Served) -> None:
    assert run_cases(server, 160) >= 100


@pytest.mark.slow
@pytest.mark.long
def test_no_request_of_2000_is_a_server_error(server: Served) -> None:
    assert run_cases(server, 2400) >= 2000
