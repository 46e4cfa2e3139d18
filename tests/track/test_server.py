"""What the page's server returns, and what it rejects."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.track.browser import watching
from tests.track.runs import opened, record_steps, recording
from zero2all.base.errors import Z2aError
from zero2all.track.html_report import report_html
from zero2all.track.http_server import serve
from zero2all.track.live_run import LiveRun
from zero2all.track.page_data import PAGE_DIR
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView
from zero2all.track.server import build_app

KEY = "the-key"
NASTY = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


def make_run(directory: Path, steps: int = 30) -> RunView:
    with recording(directory) as record:
        record.event("start", step=0, steps=steps)
        for step in range(steps):
            record.step(step, **{"loss": 8.0 - step / 10, "loss/zh": 1.0 if step != 3 else float("nan")})
        record.sample(steps, "zh", NASTY)
        record.event("spike", step=5, documents=[{"gid": "a", "loss": 9.0, "text": NASTY}])
    (directory / "recipe.yaml").write_text("name: x\ntrain: {batch_tokens: 100}\n")
    return opened(directory)


def documents(directory: Path, step: int, losses: bool) -> dict[str, Any]:
    if step > 1000:
        raise Z2aError("no such step")
    return {"documents": [{"gid": str(step), "loss": 1.0 if losses else None}]}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    (tmp_path / "secret.txt").write_text("private")
    app = build_app([make_run(tmp_path / "run")], KEY, documents)
    with TestClient(app) as started:
        started.params = {"key": KEY}
        yield started


def test_runs_and_series(client: TestClient) -> None:
    [run] = client.get("/api/runs").json()
    assert run["names"] == ["loss", "loss/zh"]
    assert run["status"]["step"] == 29
    assert run["samples"] == {"zh": [30]}
    [block] = client.get("/api/runs/0/series", params={"name": ["loss", "loss/zh"], "from": 2, "to": 4}).json()
    assert block["steps"] == [2, 3, 4]
    assert block["tokens"] == [300, 400, 500]
    assert block["mean"]["loss/zh"] == [1.0, None, 1.0]
    assert client.get("/api/runs/0/series", params={"name": "nothing"}).json() == []


def test_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    make_run(tmp_path)
    with watching(tmp_path) as (_, process):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_ctrl_c_while_the_event_loop_starts_is_no_failure_either(monkeypatch: pytest.MonkeyPatch) -> None:
    install, sent = signal.signal, []

    def install_and_interrupt(number: int, handler: Any) -> Any:
        before = install(number, handler)
        if number == signal.SIGINT and not sent:
            sent.append(number)
            signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", install_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        serve(Starlette(), "127.0.0.1", 0, lambda port: None)
    assert sent


def test_the_documents_of_a_step(client: TestClient) -> None:
    def of(step: int, losses: int) -> dict[str, Any]:
        found: dict[str, Any] = client.get("/api/runs/0/documents", params={"step": step, "losses": losses}).json()
        return found

    assert of(5, 0)["documents"][0]["loss"] == 9.0, "what the record holds"
    assert of(6, 0)["documents"] == [{"gid": "6", "loss": None}]
    assert of(6, 1)["documents"] == [{"gid": "6", "loss": 1.0}]
    assert of(2000, 0) == {"error": "no such step"}


@pytest.mark.parametrize("path", ["/api/runs", "/api/runs/0/series", "/api/runs/0/facts", "/api/stream"])
@pytest.mark.parametrize("key", ["", "the-kez", "the-key2"])
def test_without_the_key_nothing_is_given(client: TestClient, path: str, key: str) -> None:
    assert client.get(path, params={"key": key}).status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../server.py",
        "/assets/..%2fserver.py",
        "/assets/%2e%2e%2f%2e%2e%2fpyproject.toml",
        "/assets/....//server.py",
        "/assets//etc/passwd",
        "/secret.txt",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/api/runs/../../secret.txt",
        "/api/runs/1/series",
        "/api/runs/-1/series",
        "/api/runs/0%2f..%2f..%2fsecret.txt/series",
        "/api/runs/0/text?kind=sample&name=..%2f..%2fsecret.txt&step=0",
        "/api/runs/0/text?kind=..%2fsecret&name=zh&step=30",
    ],
)
def test_no_address_leads_outside_the_runs(client: TestClient, path: str) -> None:
    client.params = {}  # they would replace those of the path
    answer = client.get(f"{path}{'&' if '?' in path else '?'}key={KEY}")
    assert answer.status_code == 404
    assert "private" not in answer.text


@pytest.mark.parametrize(
    ("path", "values", "status"),
    [
        ("series?name=loss&from={}", ["x"], 400),
        ("series?name=loss&points={}", ["-5", "0", "9" * 5000, "1e3", "", "x"], 400),
        ("documents?step={}", ["1; rm", "-1", "9" * 400], 400),
        ("text?kind=sample&name=zh&step={}", ["-1", "9" * 400], 400),
        ("series?name=loss&points=5&{}", ["from=nan&to=nan", "from=inf&to=-inf", "from=1e400", "from=5&to=2"], 200),
    ],
)
def test_numbers_that_cannot_be_are_refused_and_an_unusual_range_is_empty_or_all(
    client: TestClient, path: str, values: list[str], status: int
) -> None:
    client.params = {}  # they would replace those of the path
    answers = {value: client.get(f"/api/runs/0/{path.format(value)}&key={KEY}").status_code for value in values}
    assert answers == dict.fromkeys(values, status)


def test_an_update_has_the_lines_since_and_a_resume_reloads_everything(tmp_path: Path) -> None:
    live_run = LiveRun(make_run(tmp_path, steps=10))
    seen = live_run.seen()
    record_steps(tmp_path, [10])
    live_run.refresh()
    assert live_run.version > seen.version
    update, seen = live_run.update_since(seen)
    assert [line.step for line in update.lines] == [10]
    assert not update.reload
    assert update.evals is None
    with recording(tmp_path, rank=1) as other:
        other.step(10, loss=7.0)
    record_steps(tmp_path, [11])
    live_run.refresh()
    update, seen = live_run.update_since(seen)
    assert (update.ranks, update.reload) == (True, False)
    with recording(tmp_path) as record:
        record.event("resume", step=8)
    live_run.refresh()
    assert live_run.update_since(seen)[0].reload


def test_the_page_forbids_foreign_scripts(client: TestClient) -> None:
    page = client.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"], "no page may put this one into a frame"
    assert page.headers["x-frame-options"] == "DENY"
    assert "http" not in page.text


def test_a_report_stands_alone_and_text_stays_text(tmp_path: Path) -> None:
    page = report_html([make_run(tmp_path)])
    assert "assets/" not in page
    assert NASTY not in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])  # type: ignore[index]
    assert data["texts"][0]["line"]["text"] == NASTY
    assert data["series"][0][0]["mean"]["loss"][0] == 8.0


def test_the_built_page_is_of_the_sources_beside_it() -> None:
    sources = Path(__file__).parents[2] / "web" / "src"
    if not sources.exists():
        pytest.skip("not a source checkout")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources.iterdir()))).hexdigest()
    assert digest in (PAGE_DIR / "app.js").read_text(encoding="utf-8")[:300], "run 'npm ci && npm run build' in web/"


def test_runs_that_begin_later_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.track.server.DISCOVERY_SECONDS", 0.01)
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second")
    searches, enough = count(), threading.Event()

    def search() -> list[RunView]:
        number = next(searches)
        if number == 0:
            raise Z2aError("nothing there")
        if number == 5:
            enough.set()  # the one found in an earlier search has been found again
        return [first] if number == 1 else [first, second]

    with TestClient(build_app([first], KEY, search=search)) as client:
        assert enough.wait(60)
        runs = client.get("/api/runs", params={"key": KEY}).json()
        assert [run["status"]["name"] for run in runs] == ["first", "second"]


def test_only_runs_that_changed_are_checked_and_quiet_ones_are_read_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr("zero2all.track.live_run.check_health", lambda run: checked.append(run.name) or [])
    monkeypatch.setattr("zero2all.track.live_run.HEALTH_CHECK_SECONDS", -1.0)
    make_run(tmp_path / "a")
    live_run = LiveRun(RunView(LocalRunLocation(tmp_path / "a")), read=False)
    assert (checked, live_run.summary.status.step) == ([], None)
    for _ in range(5):
        live_run.refresh()
    assert len(checked) == 1
    assert live_run.summary.status.step == 29
    assert live_run.refresh_interval(500) == 0.5
    with open(tmp_path / "a" / "record.jsonl", "a", encoding="utf-8") as stream:
        stream.write('{"step": 30, "time": 1, "loss": 1}\n')
    for _ in range(3):
        live_run.refresh()
    assert len(checked) == 2
    monkeypatch.setattr("zero2all.track.live_run.QUIET_SECONDS", -1.0)
    assert live_run.refresh_interval(10) == 0.5
    assert live_run.refresh_interval(500) == 5.0
    monkeypatch.setattr("zero2all.track.live_run.UNCHANGED_CHECK_SECONDS", -1.0)  # time alone can be a sign
    live_run.refresh()
    assert len(checked) == 3
