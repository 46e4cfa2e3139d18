"""Hostile code is contained by each backend that works on this machine, and the harness continues."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zero2all.base.errors import UsageError, Z2aError
from zero2all.sandbox import Limits, Sandbox, open_sandbox
from zero2all.sandbox import sandbox as sandbox_module
from zero2all.sandbox.backends import Launch
from zero2all.sandbox.sandbox import BackendName

MIB = 2**20


NAME = f"z2a-{os.getpid()}"
NAMED = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{NAME}')\n"  # PR_SET_NAME; children inherit it


def named_processes() -> list[str]:
    """Processes of code that begins with ``NAMED``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            found += [path.parent.name] if path.read_text(errors="replace") == f"{NAME}\n" else []
        except OSError:
            continue  # it has ended
    return found


def wait_for_named_processes(some: bool = False) -> None:
    """Until there are some or none: the kernel ends the processes of a namespace after its first one."""
    deadline = time.monotonic() + (60 if some else 30)
    while bool(named_processes()) != some:
        assert time.monotonic() < deadline, named_processes()
        time.sleep(0.05)


def test_the_result_says_how_code_ended(sandbox: Sandbox) -> None:
    for code, status, output in (
        ("print(1 + 1)", "ok", "2\n"),
        ("if __name__ == '__main__': print('日本')", "ok", "日本\n"),
        ("print('a'); 1 / 0", "failed", "a\n"),
        ("print('a'\n", "failed", ""),
        ("raise SystemExit(0)", "failed", ""),
        ("import os; os._exit(0)", "killed", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "killed", ""),
    ):
        result = sandbox.run_python(code)
        assert (result.status, result.stdout) == (status, output), (code, result)
    assert "ZeroDivisionError" in sandbox.run_python("1 / 0").stderr


def test_code_cannot_claim_success_by_printing_the_end_of_another_run(sandbox: Sandbox) -> None:
    result = sandbox.run_python("import os; os.write(1, b'\\0' + b'0' * 32 + b'\\0ok'); os._exit(0)")
    assert result.status == "killed"


def test_output_is_bounded_and_does_not_block(backend: BackendName) -> None:
    result = Sandbox(backend, Limits(output=1000)).run_python("print('x' * 5_000_000)")
    assert (result.status, result.stdout) == ("ok", "x" * 1000)


def test_an_allocation_of_1_gb_fails(sandbox: Sandbox) -> None:
    assert sandbox.run_python("x = bytearray(1 << 30)").status == "memory"
    assert sandbox.run_python("import mmap; mmap.mmap(-1, 1 << 30)").status in ("failed", "memory")


def test_memory_that_no_process_owns_is_refused(sandbox: Sandbox) -> None:
    code = "import os; f = os.memfd_create('x')\nfor _ in range(64): os.write(f, bytes(1 << 20))"
    assert sandbox.run_python(code).status == "failed"


def test_an_endless_sleep_is_ended_with_its_detached_processes(backend: BackendName) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            pass
    os._exit(0)
print("started", flush=True)
time.sleep(1000)
"""
    for ending in ("time.sleep(1000)", "pass"):
        limits = Limits(seconds=1, processes=8)
        result = Sandbox(backend, limits).run_python(NAMED + code.replace("time.sleep(1000)", ending))
        assert result.stdout == "started\n"
        assert result.status == ("ok" if ending == "pass" else "timeout")
        wait_for_named_processes()


def test_a_fork_bomb_ends(sandbox: Sandbox) -> None:
    code = "import os\nn = 0\ntry:\n  while True:\n    if os.fork() == 0:\n      while True: pass\n    n += 1\n"
    result = sandbox.run_python(code + "except OSError:\n  print(n)")
    assert result.status == "ok", result
    assert 1 <= int(result.stdout) <= sandbox.limits.processes
    nested = Sandbox(sandbox.backend, Limits(seconds=1, processes=8))
    endless = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert nested.run_python(NAMED + endless).status == "timeout"
    wait_for_named_processes()
    assert sandbox.run_python("print(1)").stdout == "1\n"


def test_files_outside_are_neither_read_nor_written(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("planted")
    link = f"os.path.exists('link') or os.symlink({str(secret)!r}, 'link'); "
    attempts = [
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w').write('x')",
        f"open({str(tmp_path / 'new')!r}, 'w').write('x')",
        f"os.unlink({str(secret)!r})",
        f"os.chmod({str(secret)!r}, 0o777)",
        f"os.utime({str(secret)!r}, (0, 0))",
        f"os.rename({str(secret)!r}, 'here')",
        f"os.link({str(secret)!r}, 'here'); print(open('here').read())",
        f"os.setxattr({str(secret)!r}, 'user.a', b'x')",
        f"f = os.open({sys.executable!r}, os.O_RDONLY); os.fchmod(f, os.fstat(f).st_mode)",
        link + "print(open('link').read())",
        link + "open('link', 'w').write('x')",
        "open('/etc/passwd', 'a').write('x')",
        "open('/usr/bin/z2a-test', 'w').write('x')",
        f"open({sys.base_prefix + '/z2a-test'!r}, 'w').write('x')",
        f"print(open({str(Path(__file__))!r}).read())",
        "print(open('/etc/shadow').read())",
    ]
    result = sandbox.run_python(_attempts(attempts))
    assert (result.status, result.stdout) == ("ok", "")
    assert secret.read_text() == "planted"
    assert sorted(tmp_path.iterdir()) == [secret]
    assert secret.stat().st_mode & 0o777 == 0o644 & ~_umask()


def _attempts(lines: list[str]) -> str:
    """A program that prints which of the lines raise nothing."""
    return f"import os\nfor line in {lines!r}:\n  try: exec(line); print(line)\n  except OSError: pass"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_environment_of_the_harness_is_hidden(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("Z2A_PLANTED", "planted-value")
    result = sandbox.run_python(
        """
import glob, os
print(dict(os.environ))
for path in ["/proc/1/environ", "/proc/self/environ", f"/proc/{os.getppid()}/environ", *glob.glob("/proc/*/environ")]:
    try:
        print(open(path, "rb").read())
    except OSError:
        pass
"""
    )
    assert result.status == "ok"
    assert "planted" not in result.stdout
    assert "PATH" in result.stdout


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["TCP", "UDP"])
def test_nothing_reaches_the_network(sandbox: Sandbox, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.2)
        if kind == socket.SOCK_STREAM:
            server.listen()
        code = f"import socket; s = socket.socket(socket.AF_INET, {int(kind)}); s.connect({server.getsockname()!r})"
        result = sandbox.run_python(code + "; s.send(b'hello')")
        assert result.status == "failed" or kind == socket.SOCK_DGRAM
        with pytest.raises(TimeoutError):
            server.accept() if kind == socket.SOCK_STREAM else server.recv(10)


def test_other_processes_are_out_of_reach(sandbox: Sandbox) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        result = sandbox.run_python(
            f"""
import os, signal
for pid in (os.getppid(), {os.getpid()}, {victim.pid}, -1):
    try:
        os.kill(pid, signal.SIGTERM) if pid != -1 else os.kill({os.getpid()}, signal.SIGKILL)
    except OSError:
        pass
print("still here")
"""
        )
        assert victim.poll() is None
        victim.communicate(b"\n")
    assert victim.returncode == 0
    assert result.status in ("ok", "killed")


def test_the_disk_cannot_be_filled(sandbox: Sandbox) -> None:
    one = "f = open('x', 'wb')\nfor _ in range(200):\n  f.write(bytes(1 << 20)); f.flush()"
    many = "for i in range(200):\n  with open(f'x{i}', 'wb') as f: f.write(bytes(1 << 20))"
    for code in (one, many):
        assert sandbox.run_python(code).status in ("failed", "killed")
    assert sandbox.run_python("open('x', 'w').write('a'); print(open('x').read())").stdout == "a\n"


def test_what_code_leaves_is_removed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = "import os\nfor _ in range(1500):\n  os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"
    assert sandbox.run_python(deep).status in ("ok", "failed")
    assert list(tmp_path.iterdir()) == []


def test_code_has_no_privileges(sandbox: Sandbox) -> None:
    attempts = [
        "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())",
        "os.setuid(0); open('/etc/shadow')",
        "import ctypes; ctypes.CDLL(None).unshare(0x10000000) == 0 or os.stat('none')",
        "import ctypes; ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, b'') == 0 or os.stat('none')",
    ]
    result = sandbox.run_python(_attempts(attempts))
    assert (result.status, result.stdout) == ("ok", "")
    raised = sandbox.run_python("import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1 << 40, 1 << 40))")
    assert "not allowed to raise" in raised.stderr


def test_several_threads_use_one_sandbox(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(3) as pool:
        outputs = pool.map(lambda number: sandbox.run_python(f"print({number})").stdout, range(3))
    assert list(outputs) == ["0\n", "1\n", "2\n"]


def test_code_ends_with_a_killed_harness(backend: BackendName, tmp_path: Path) -> None:
    program = (
        "from zero2all.sandbox import *; import sys\n"
        f"Sandbox({backend!r}, Limits(seconds=100)).run_python({NAMED + 'import time; time.sleep(100)'!r})"
    )
    harness = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)})
    wait_for_named_processes(some=True)
    harness.kill()
    harness.wait()
    wait_for_named_processes()


def test_without_a_sandbox_code_is_refused_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "find_spec", lambda name: None)
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="--unsafe-code"):
        open_sandbox()
    unsafe = open_sandbox(Limits(seconds=1, memory=256 * MIB), unsafe=True)
    assert unsafe.backend == "none"
    assert unsafe.run_python("print(2)").stdout == "2\n"
    assert unsafe.run_python("x = bytearray(1 << 30)").status == "memory"
    assert unsafe.run_python(NAMED + "while True: pass").status == "timeout"
    assert unsafe.run_tests(NAMED + "def f(): return 1", "assert f() == 1", "f").status == "ok"
    wait_for_named_processes()


def test_a_backend_that_fails_is_an_error_and_not_a_failed_program(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Launch(["sh", "-c", "echo no namespaces here >&2; exit 1"], None, {})
    monkeypatch.setitem(sandbox_module.BACKENDS, "bubblewrap", lambda directory, limits: broken)
    with pytest.raises(Z2aError, match="no namespaces here"):
        Sandbox("bubblewrap").run_python("pass")


def test_a_working_backend_is_chosen() -> None:
    try:
        chosen = open_sandbox()
    except UsageError as error:
        pytest.skip(str(error))
    assert chosen.backend in ("sandlock", "bubblewrap")
