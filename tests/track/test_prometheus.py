"""``/metrics``: strictly valid text whatever a run has written, with the page's key; and a real Prometheus reads it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.testclient import TestClient

from tests.sshd import free_port
from tests.track.browser import watching
from tests.track.runs import opened
from tests.track.test_hostile import BAD_LINES, UNUSUAL_LINES, as_bytes
from zero2all.base.errors import UsageError, Z2aError
from zero2all.track import prometheus
from zero2all.track.eval_record import EvalLine, append_evals
from zero2all.track.health_checks import check_health
from zero2all.track.http_server import load_key
from zero2all.track.prometheus import CONTENT_TYPE, FAMILIES, exposition, run_series, unreadable_run
from zero2all.track.run_view import RunView
from zero2all.track.server import build_app

KEY = "the-key"
DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD, METRICS_PAGE = DOCS / "grafana-dashboard.json", DOCS / "how-to" / "watch" / "prometheus.md"
HOSTILE_NAMES = [
    'a"b', "a\\", "a\nzero2all_loss 1", 'x"} 5\n# TYPE zero2all_loss counter', "\x00", "\x1b[31m", "\r",
    "\ud800", "\\ud800", "\u2028", "\u202e", "床前明月光", "", " ", "{}", "a,b=", "# HELP x", "\x7f\x85",
]  # fmt: skip
HOSTILE_RUN = 'r"un} 5\\\n\x01\udcff'
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
VALUE = re.compile(r"[+-]?(\d+(\.\d+)?(e[+-]?\d+)?|Inf)|NaN")


class Parsed(NamedTuple):
    types: dict[str, str]
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, /, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def of(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for found, labels in self.samples if found == name]


def parse(text: str) -> Parsed:
    """Stricter than Prometheus: HELP and TYPE before the samples of a family, in one group, and nothing twice."""
    parsed, family, head = Parsed({}, {}), "", ""
    assert text.endswith("\n") or not text
    for line in text.split("\n")[:-1]:
        if help_line := re.fullmatch(rf"# HELP ({NAME}) (\S.*)", line):
            assert not head
            head = help_line[1]
        elif type_line := re.fullmatch(rf"# TYPE ({NAME}) (gauge|counter)", line):
            family = type_line[1]
            assert head == family
            assert family not in parsed.types
            parsed.types[family], head = type_line[2], ""
        else:
            sample = re.fullmatch(rf"({NAME})\{{(.*)\}} (\S+)", line)
            assert sample, line
            assert sample[1] == family
            assert not head
            assert VALUE.fullmatch(sample[3]), line
            key = (sample[1], frozenset(parse_labels(sample[2])))
            assert key not in parsed.samples, line
            parsed.samples[key] = float(sample[3])
    return parsed


def parse_labels(text: str) -> Iterator[tuple[str, str]]:
    at, seen = 0, set()
    while at < len(text):
        found = LABEL.match(text, at)
        assert found, text
        assert found[1] not in seen
        seen.add(found[1])
        yield found[1], re.sub(r"\\(.)", lambda escape: "\n" if escape[1] == "n" else escape[1], found[2])
        at = found.end()


def json_line(**values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"


def write_run(directory: Path, extra: dict[str, float] | None = None, steps: int = 100, now: float = 1e9) -> RunView:
    """A run that writes everything that has a metric; step i is recorded at ``now + i``."""
    directory.mkdir(parents=True)
    lines = [json_line(event="start", step=0, steps=2 * steps, time=now - 1, startup=9.0)]
    for step in range(steps):
        values = {
            "loss": 8.0 - step / 100, "loss/zh": 3.5, "loss/en": 3.25, "bpb/zh": 1.5, "lr": 1e-3, "grad_norm": 0.5,
            "tokens_per_second": 1e5, "tflops": 120.5, "mfu": 0.4, "mfu_palm": 0.44, "hfu": 0.45,
            "memory": 2**30, "memory_reserved": 2**31, "data_wait": 0.01, "rewards/margins": 0.75,
        }  # fmt: skip
        lines.append(json_line(step=step, time=now + step, **values, **(extra or {})))
    last = now + steps
    lines += [
        json_line(step=10, time=last, **{"valid/rewards/accuracies": 0.625}),
        json_line(step=steps - 1, time=last, checkpoint_stall=0.5),
        json_line(step=steps - 1, time=last, **{"system/load": 1.5}),
        json_line(
            event="evaluation", step=steps - 1, time=last + 4, bits_per_byte=1.25, bytes=10,
            sources={"zh": {"bits_per_byte": 1.5}}, test_sets={"poems": {"bits_per_byte": 2.0}},
        ),
    ]  # fmt: skip
    (directory / "record.jsonl").write_bytes(b"".join(lines))
    (directory / "record.rank3.jsonl").write_bytes(json_line(step=steps - 1, time=last, memory=2**31, other=1.0))
    (directory / "recipe.yaml").write_text("name: x\ntrain: {batch_tokens: 1000}\n")
    probe = EvalLine(
        kind="probes", suite="stories", name="sum-en", step=steps, value=0.7, metric="probability", better="higher",
        time=last,
    )  # fmt: skip
    append_evals(directory, [probe])
    return opened(directory)


def exported(*runs: RunView) -> Parsed:
    text = exposition([run_series(run, run.status(), check_health(run)) for run in runs])
    assert text.encode().decode() == text
    return parse(text)


def test_every_family_of_a_run_that_records_everything(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    parsed = exported(run)
    assert list(parsed.types) == [family.name for family in FAMILIES]
    assert parsed.types["zero2all_restarts_total"] == "counter"
    expected: dict[tuple[str, ...], float] = {
        ("readable",): 1, ("ended",): 0, ("step",): 99, ("planned_steps",): 200, ("tokens",): 100_000,
        ("loss",): 7.01, ("learning_rate",): 1e-3, ("gradient_norm",): 0.5, ("tokens_per_second",): 1e5,
        ("tflops",): 120.5, ("mfu_ratio",): 0.4, ("mfu_palm_ratio",): 0.44, ("hfu_ratio",): 0.45,
        ("step_seconds",): 1.0, ("remaining_seconds",): 100.0,
        ("last_step_timestamp_seconds",): 1e9 + 99, ("last_record_timestamp_seconds",): 1e9 + 104,
        ("goodput_ratio",): 100 / 101, ("restarts_total",): 0,
        ("source_loss", "source", "zh"): 3.5, ("source_loss", "source", "en"): 3.25,
        ("source_bpb", "source", "zh"): 1.5, ("validation_bpb", "name", "all"): 1.25,
        ("validation_bpb", "name", "poems (test set)"): 2.0,
        ("validation_metric", "name", "rewards/accuracies"): 0.625,
        ("evaluation", "kind", "probes", "suite", "stories", "name", "sum-en", "metric", "probability"): 0.7,
        ("memory_reserved_bytes", "rank", "0"): 2**31,
        ("memory_bytes", "rank", "0"): 2**30, ("memory_bytes", "rank", "3"): 2**31,
        ("data_wait_ratio", "rank", "0"): 0.01, ("checkpoint_stall_seconds", "rank", "0"): 0.5,
        ("metric", "name", "rewards/margins", "rank", "0"): 0.75,
        ("metric", "name", "system/load", "rank", "0"): 1.5, ("metric", "name", "other", "rank", "3"): 1.0,
        ("dropped_series",): 0,
    }  # fmt: skip
    for (name, *labels), value in expected.items():
        pairs = dict(zip(labels[::2], labels[1::2], strict=True))
        assert parsed.value(f"zero2all_{name}", run="a", **pairs) == pytest.approx(value), (name, labels)
    names = {labels["name"] for labels in parsed.of("zero2all_metric")}
    assert names == {"rewards/margins", "system/load", "other"}, "what has a family of its own is not repeated"


def test_two_runs_share_the_families_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / part / "a") for part in ("one", "two")]
    parsed = exported(*runs, write_run(tmp_path / "b"))
    assert [labels["run"] for labels in parsed.of("zero2all_loss")] == ["a", "a (2)", "b"]


def test_hostile_names_are_only_label_values(tmp_path: Path) -> None:
    extra = {f"{prefix}{name}": 1.0 for prefix in ("loss/", "valid/", "", "x") for name in HOSTILE_NAMES}
    hostile = write_run(tmp_path / HOSTILE_RUN, extra)
    parsed = exported(hostile, write_run(tmp_path / "b", extra))
    assert [labels["run"] for labels in parsed.of("zero2all_loss")] == ['r"un} 5\\\n\\x01\\udcff', "b"]
    assert {name for name, _ in parsed.samples} <= {family.name for family in FAMILIES}
    sources = {labels["source"] for labels in parsed.of("zero2all_source_loss")}
    assert {'a"b', "a\\", "a\nzero2all_loss 1", "\\x00", "\\x0d", "\\ud800", "床前明月光", ""} <= sources
    assert parsed.value("zero2all_loss", run="b") == 7.01
    assert parsed.value("zero2all_dropped_series", run="b") > 0, "a surrogate and its spelling become one"
    # No character that a parser could take for the end of a line or of the text, or that UTF-8 lacks.
    assert not re.search(
        r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", exposition([run_series(hostile, hostile.status())])
    )


def test_lines_that_another_program_wrote(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    with open(tmp_path / "a" / "record.jsonl", "ab") as stream:
        stream.write(b"".join(map(as_bytes, {**BAD_LINES, **UNUSUAL_LINES}.values())))
    exported(opened(tmp_path / "a"))


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    with open(tmp_path / "a" / "record.jsonl", "ab") as stream:
        stream.write(
            b'{"step":100,"time":1e9,"loss":NaN,"grad_norm":Infinity,"lr":-Infinity,"mfu":1e300,"hfu":1e-300}\n'
        )
    run = opened(tmp_path / "a")
    parsed = exported(run)
    assert math.isnan(parsed.value("zero2all_loss", run="a"))
    assert parsed.value("zero2all_gradient_norm", run="a") == math.inf
    assert parsed.value("zero2all_learning_rate", run="a") == -math.inf
    assert (parsed.value("zero2all_mfu_ratio", run="a"), parsed.value("zero2all_hfu_ratio", run="a")) == (1e300, 1e-300)
    text = exposition([run_series(run, run.status())])
    assert 'zero2all_loss{run="a"} NaN\n' in text
    assert 'zero2all_gradient_norm{run="a"} +Inf\n' in text


def test_the_series_of_a_run_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_SERIES", 100)
    run = write_run(tmp_path / "a", {f"x{number}": 1.0 for number in range(1000)} | {"y" * 201: 1.0}, steps=2)
    parsed = exported(run)
    assert len(parsed.samples) == 101, "and how many were dropped"
    assert parsed.value("zero2all_dropped_series", run="a") > 900
    assert parsed.value("zero2all_validation_bpb", run="a", name="all") == 1.25, "the fixed ones are kept"


def test_a_label_that_is_too_long_is_dropped(tmp_path: Path) -> None:
    parsed = exported(write_run(tmp_path / "a", {"y" * 201: 1.0, "y" * 200: 2.0}, steps=2))
    assert parsed.value("zero2all_dropped_series", run="a") == 1
    assert parsed.value("zero2all_metric", run="a", name="y" * 200, rank="0") == 2.0


def test_a_run_without_a_step_has_no_values_but_is_listed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "record.jsonl").touch()
    parsed = exported(opened(tmp_path / "a"))
    assert parsed.value("zero2all_readable", run="a") == 1
    assert not parsed.of("zero2all_step")
    assert parse(exposition([unreadable_run("a")])).value("zero2all_readable", run="a") == 0
    assert exposition([]) == ""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    runs = [write_run(tmp_path_factory.mktemp("runs") / name) for name in ("a", "b")]
    with TestClient(build_app(runs, KEY)) as opened_client:
        yield opened_client


@pytest.mark.parametrize(
    ("key", "header", "status"),
    [
        (KEY, None, 200),
        (None, f"Bearer {KEY}", 200),
        (None, f"bearer  {KEY}", 200),
        ("wrong", f"Bearer {KEY}", 200),
        (None, None, 403),
        ("wrong", None, 403),
        (None, "Bearer wrong", 403),
        (None, "Bearer ", 403),
        (None, KEY, 403),
        (None, f"Basic {KEY}", 403),
        (None, "Bearer ungültig".encode("latin-1"), 403),
        ("", "Bearer", 403),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/api/runs"])
def test_the_key_is_needed(
    client: TestClient, path: str, key: str | None, header: str | bytes | None, status: int
) -> None:
    headers = {} if header is None else {"Authorization": header}
    answer = client.get(path, params={} if key is None else {"key": key}, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == status
    if path == "/metrics" and status == 200:
        assert answer.headers["content-type"] == CONTENT_TYPE
        parsed = parse(answer.text)
        assert [labels["run"] for labels in parsed.of("zero2all_loss")] == ["a", "b"]
    elif status == 403:
        assert "zero2all" not in answer.text


def test_a_run_that_cannot_be_exported_does_not_hide_the_others(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_for_a(run: RunView, *rest: Any) -> prometheus.RunSeries:
        if run.name == "a":
            raise Z2aError("gone")
        return run_series(run, *rest)

    monkeypatch.setattr("zero2all.track.live_run.run_series", fail_for_a)
    parsed = parse(client.get("/metrics", params={"key": KEY}).text)
    assert parsed.value("zero2all_readable", run="a") == 0
    assert parsed.value("zero2all_loss", run="b") == 7.01


def test_the_key_of_a_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key"
    key = load_key(path)
    assert len(key) >= 16
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path) == key
    path.chmod(0o604)
    with pytest.raises(UsageError, match="chmod 600"):
        load_key(path)
    path.chmod(0o600)
    for bad in ("short", "a key with blanks in it", "键" * 20):
        path.write_text(bad, encoding="utf-8")
        with pytest.raises(UsageError, match="key"):
            load_key(path)
    with pytest.raises(UsageError, match="--key-file"):
        load_key(tmp_path)


def scrape(server: str, key: str) -> str:
    request = urllib.request.Request(f"http://{server}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def test_watch_serves_metrics_with_the_key_of_a_file(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "key").write_text("0123456789abcdef\n")
    (tmp_path / "key").chmod(0o600)
    with watching(tmp_path / "runs", "--key-file", tmp_path / "key") as (address, _):
        assert address.endswith("?key=0123456789abcdef")
        server = urllib.parse.urlsplit(address).netloc
        assert parse(scrape(server, "0123456789abcdef")).value("zero2all_step", run="a") == 99
        with pytest.raises(urllib.error.HTTPError, match="403"):
            scrape(server, "0123456789abcdeg")


def dashboard_queries() -> list[tuple[str, str]]:
    """(panel, expression) of every query, with all runs."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [(panel["title"], target["expr"].replace("$run", ".*")) for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_only_for_what_is_exported_and_the_docs_have_all_of_it() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    dashboard = json.loads(text)
    used = set(re.findall(r"zero2all_\w+", text))
    assert used <= {family.name for family in FAMILIES}
    assert {"zero2all_loss", "zero2all_health_findings"} <= used
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run"]
    assert all('run=~".*"' in expression for _, expression in dashboard_queries())
    labels = {label for family in FAMILIES for label in family.labels} | {"run"}
    assert set(re.findall(r"\{\{(\w+)\}\}", text)) <= labels
    page = METRICS_PAGE.read_text(encoding="utf-8")
    assert [family.name for family in FAMILIES if f"`{family.name.removeprefix('zero2all_')}`" not in page] == []
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


@contextmanager
def running_prometheus(program: str, directory: Path, target: str, key_file: Path) -> Iterator[str]:
    """The address of a real Prometheus that scrapes ``target`` every second, as the docs tell it to."""
    config, port = directory / "prometheus.yml", free_port()
    [documented] = re.findall(r"```yaml\n(scrape_configs:.*?)```", METRICS_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for example, own in (("/home/me/watch.key", str(key_file)), ("127.0.0.1:9464", target)):
        assert example in documented
        documented = documented.replace(example, own)
    config.write_text(f"global: {{scrape_interval: 1s}}\n{documented}", encoding="utf-8")
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={directory}/data"]
    with open(directory / "prometheus.log", "wb") as log:
        process = subprocess.Popen(
            [program, *arguments, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, cwd=directory
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ask(server: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{server}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.load(answer)["data"]


def wait_until_scraped(server: str, seconds: float = 60.0) -> None:
    deadline, seen = time.monotonic() + seconds, "nothing"
    while time.monotonic() < deadline:
        try:
            targets = ask(server, "/api/v1/targets")["activeTargets"]
            seen = ", ".join(f"{target['health']} {target['lastError']}" for target in targets)
            if targets and all(target["health"] == "up" for target in targets):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            seen = str(error)
        time.sleep(0.2)
    pytest.fail(f"the target is not up after {seconds:.0f} s: {seen}")


@pytest.mark.long
def test_a_real_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("needs prometheus (Debian: prometheus)")
    write_run(tmp_path / "runs" / "a", now=time.time() - 200)
    hostile = {f"loss/{name}": math.nan for name in HOSTILE_NAMES}
    name = HOSTILE_RUN.replace("\n", "")  # which the "." of a query does not match
    write_run(tmp_path / "runs" / name, hostile, now=time.time() - 200)
    key_file = tmp_path / "key"
    with watching(tmp_path / "runs", "--key-file", key_file) as (address, _):
        target = urllib.parse.urlsplit(address)
        text = scrape(target.netloc, load_key(key_file))
        exported_names = {labels["run"] for labels in parse(text).of("zero2all_loss")}
        assert len(exported_names) == 2
        with running_prometheus(program, tmp_path, target.netloc, key_file) as server:
            wait_until_scraped(server)
            for panel, expression in dashboard_queries():
                found = ask(server, "/api/v1/query", query=expression)["result"]
                assert {series["metric"]["run"] for series in found} == exported_names, f"{panel}: {expression}"
            [loss] = ask(server, "/api/v1/query", query='zero2all_loss{run="a"}')["result"]
            assert float(loss["value"][1]) == 7.01
            sources = ask(server, "/api/v1/query", query='zero2all_source_loss{run!="a"}')["result"]
            assert {series["metric"].get("source", "") for series in sources} == {
                labels["source"] for labels in parse(text).of("zero2all_source_loss") if labels["run"] != "a"
            }
    if (promtool := shutil.which("promtool")) is not None:
        checked = subprocess.run([promtool, "check", "metrics"], input=text.encode(), capture_output=True, timeout=60)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
