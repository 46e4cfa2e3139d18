"""Hooks that are told of events: a real command, a real HTTP server on the loopback, and hostile ones."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from zero2all.base.environment import JOB_SECRET_VARIABLE, NOTIFY_VARIABLE
from zero2all.base.errors import UsageError
from zero2all.cluster.launch import notify
from zero2all.cluster.launch.notify import JobEvent, Notifier, masked, parse_hook
from zero2all.cluster.launch.restart_policy import NodePolicy

LOST = JobEvent("node lost", "a (10.0.0.1) is lost", "a (10.0.0.1)")
DONE = JobEvent("job finished", "the job is done")


class Hook(BaseHTTPRequestHandler):
    received: ClassVar[list[dict[str, Any]]] = []
    hold: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/slow"):
            self.hold.wait(30)
        self.received.append(json.loads(body))
        if self.path.startswith("/moved"):
            self.send_response(307)
            self.send_header("Location", "/elsewhere")
        else:
            self.send_response(500 if self.path.startswith("/broken") else 200)
        self.end_headers()
        self.wfile.write(b"secret-of-the-server")

    def log_message(self, *args: object) -> None:
        pass


class HookServer(ThreadingHTTPServer):
    daemon_threads = False  # server_close() waits for the handlers: none prints into the output of the next test

    def handle_error(self, *args: object) -> None:
        """The notifier has closed the connection: it does not wait for a slow server."""


@pytest.fixture
def url() -> Iterator[str]:
    Hook.received.clear()
    Hook.hold.clear()
    server = HookServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Hook.hold.set()
    server.shutdown()
    server.server_close()


def send_all(hook: str | None, *events: JobEvent) -> float:
    """The seconds that ``send`` took."""
    notifier = Notifier(hook, ["train", "my.yaml", "corpus=s3://key:geheim@bucket"])
    notifier.find_run = lambda: Path("/runs/first")
    begin = time.monotonic()
    for event in events:
        notifier.send(event)
    took = time.monotonic() - begin
    notifier.close()
    return took


def test_a_webhook_gets_the_events_in_order(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    send_all(f"{url}/services/T0/B0/geheim", LOST, DONE)
    assert [(found["event"], found["node"]) for found in Hook.received] == [
        ("node lost", "a (10.0.0.1)"), ("job finished", None),
    ]  # fmt: skip
    assert Hook.received[0]["run"] == "/runs/first"
    assert "geheim" not in json.dumps(Hook.received), "the command is redacted"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("path", "reason"), [("broken", "status 500"), ("moved", "status 307")])
def test_a_webhook_that_fails_is_logged_once_without_its_secrets(
    url: str, path: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    send_all(f"{url}/{path}/geheim?token=geheim", LOST, LOST, DONE)
    logged = capsys.readouterr().err
    assert logged.count("warning: --notify http://127.0.0.1/*** failed") == 1
    assert reason in logged
    assert "geheim" not in logged
    assert "secret-of-the-server" not in logged
    assert len(Hook.received) == 3, "a redirect is not followed"


def test_hooks_that_hang_never_hold_up_the_agent(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT", 0.3)
    monkeypatch.setattr(notify, "FLUSH_TIMEOUT", 0.5)
    monkeypatch.setattr(notify, "MAX_QUEUED", 2)
    begin = time.monotonic()
    assert send_all(f"{url}/slow", *[LOST] * 20) < 1.0
    child = tmp_path / "child.py"
    child.write_text("import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    assert send_all(f"{sys.executable} {child} {tmp_path / 'pid'}", LOST) < 1.0
    assert time.monotonic() - begin < 20
    assert "dropped" in capsys.readouterr().err
    deadline = time.monotonic() + 20
    while (tmp_path / "pid").exists() and Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists():
        assert time.monotonic() < deadline, "the hook is killed"
        time.sleep(0.05)


def test_a_command_gets_the_event_on_stdin_and_no_secret_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(JOB_SECRET_VARIABLE, "geheim")
    program = tmp_path / "hook with space.py"
    program.write_text(
        "import os, sys\n"
        f"open({str(tmp_path / 'out')!r}, 'a').write(sys.stdin.read() + '\\n' + repr(sys.argv[1:]) + '\\n')\n"
        "print('geheim', file=sys.stderr)\nprint('geheim')\n"
        f"sys.exit('{JOB_SECRET_VARIABLE}' in os.environ)\n"
    )
    send_all(f"{sys.executable} '{program}' '$(touch {tmp_path}/shell)' ';'", LOST)
    body, words = (tmp_path / "out").read_text().splitlines()
    assert json.loads(body)["text"] == LOST.text
    assert words == repr([f"$(touch {tmp_path}/shell)", ";"]), "no shell reads them"
    out, err = capfd.readouterr()
    assert (out, err) == ("", ""), "what it prints is dropped, and it succeeded"


@pytest.mark.parametrize("hook", [f"{sys.executable} -c 'raise SystemExit(3)'", "/no/such/command", "/etc"])
def test_a_command_that_fails_is_logged_once(hook: str, capsys: pytest.CaptureFixture[str]) -> None:
    send_all(hook, LOST, DONE)
    assert capsys.readouterr().err.count("failed: ") == 1


@pytest.mark.parametrize("hook", ["", "ftp://host/x", "https://", "'unclosed", "file:///etc/passwd"])
def test_hooks_that_make_no_sense_are_refused(hook: str) -> None:
    with pytest.raises(UsageError):
        parse_hook(hook)


def test_masking_and_job_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert masked("https://user:pw@hooks.example.com:8443/services/T/B/x?y=z") == "https://hooks.example.com/***"
    policy = NodePolicy(notify="https://hooks.example.com/x y")
    assert policy.arguments() == ["--notify", "https://hooks.example.com/x y"]
    monkeypatch.setenv(NOTIFY_VARIABLE, "https://hooks.example.com/x y")
    assert policy.arguments() == [], "the job inherits the variable"
    send_all(None, LOST)
