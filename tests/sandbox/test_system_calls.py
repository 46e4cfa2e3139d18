"""System calls that take a process, a user or a group: each has a rule, the filter implements it, none reaches out."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.sandbox import attack
from tests.sandbox.make_system_calls import identities

import zero2all
from zero2all.sandbox.seccomp import MACHINES, RULES, seccomp_filter, system_calls

ALLOWED, NOBODY = 0, 65534
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
OWN = {"getgroups", "getresgid", "getresuid", "getrusage"}  # of the caller
SENDS_NOTHING = {"sendmmsg"}


def test_every_system_call_that_takes_an_identity_has_a_rule_and_is_attacked() -> None:
    taking = {call.name for call in system_calls() if call.identities}
    assert len(taking) > 80
    assert {"prlimit64", "kill", "pidfd_open", "ptrace", "setuid", "clone3", "fcntl"} <= taking
    assert taking - set(RULES) == set()
    assert taking - set(attack.ARGUMENTS) == set()
    assert all(rule.reason for rule in RULES.values())
    assert set(RULES) <= {call.name for call in system_calls()}


def test_the_table_is_what_its_script_makes() -> None:
    for call in system_calls():
        assert call.identities == identities(call.name, list(call.arguments)), call.name
    for machine in MACHINES:
        numbers = [call.numbers[machine] for call in system_calls() if machine in call.numbers]
        assert len(numbers) == len(set(numbers)) > 300


def test_numbers_are_those_of_the_headers() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the headers of the kernel are not installed")
    defined = dict(re.findall(r"__NR_(\w+) (\d+)", header.read_text(encoding="utf-8")))
    own = {call.name: call.numbers["x86_64"] for call in system_calls() if "x86_64" in call.numbers}
    shared = set(defined) & set(own)
    assert len(shared) > 300
    assert {name: int(defined[name]) for name in shared} == {name: own[name] for name in shared}
    pids = {"prlimit64", "kill", "sched_setaffinity", "ptrace", "process_vm_readv", "kcmp", "move_pages"}
    assert pids <= shared


def verdict(machine: str, has_pid_namespace: bool, name: str, *arguments: int) -> int:
    """The errno of the filter for a call, computed as the kernel does; 0: allowed."""
    number = next(call.numbers[machine] for call in system_calls() if call.name == name)
    return run_filter(
        seccomp_filter(has_pid_namespace=has_pid_namespace, machine=machine), ARCHITECTURES[machine], number, arguments
    )


def run_filter(program: bytes, architecture: int, number: int, arguments: Sequence[int]) -> int:
    padded = [argument & (2**64 - 1) for argument in (*arguments, *[0] * 6)][:6]
    data = struct.pack("=iIQ6Q", number, architecture, 0, *padded)
    instructions = list(struct.iter_unpack("=HBBI", program))
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = instructions[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return {0x7FFF0000: ALLOWED, 0x80000000: -1}.get(value, value & 0xFFFF)
        else:
            tests = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}
            position += if_true if (tests | {0x45: bool(accumulator & value)})[code] else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_implements_the_rules(machine: str) -> None:
    for has_namespace in (False, True):
        other = ALLOWED if has_namespace else errno.EPERM
        for name, arguments, expected in (
            ("prlimit64", (0, 0), ALLOWED),
            ("prlimit64", (77, 0), errno.EPERM),
            ("prlimit64", (2**32 + 77, 0), errno.EPERM),
            ("kill", (77, 9), other),
            ("kill", (-1, 9), other),
            ("kill", (0, 9), ALLOWED),
            ("sched_setaffinity", (77,), other),
            ("sched_setaffinity", (0,), ALLOWED),
            ("setpriority", (0, 77), other),
            ("setpriority", (0, 0), ALLOWED),
            ("setpriority", (2, 0), errno.EPERM),  # all processes of the user
            ("ioprio_set", (3, 0), errno.EPERM),
            ("pidfd_send_signal", (3, 9), other),
            ("clock_gettime", (1,), ALLOWED),
            ("clock_gettime", (-6,), ALLOWED),  # of the caller
            ("clock_gettime", (~77 << 3 | 2,), other),
            ("fcntl", (3, 1), ALLOWED),
            ("fcntl", (3, 8, 77), errno.EPERM),
            ("fcntl", (3, 15), errno.EPERM),
            ("fcntl", (3, 1030), ALLOWED),
            ("ioctl", (0, 0x5401), ALLOWED),
            ("ioctl", (0, 0x8901), errno.EPERM),
            ("prctl", (15,), ALLOWED),
            ("prctl", (62, 1, 77), errno.EPERM),
            ("clone", (0x01200011,), ALLOWED),
            ("clone", (0x10000011,), errno.EPERM),
            ("clone3", (1, 88), errno.ENOSYS),
            ("setuid", (0,), errno.EPERM),
            ("wait4", (77,), ALLOWED),
            ("ptrace", (16, 77), errno.EPERM),
            ("pidfd_getfd", (3, 0), errno.EPERM),
            ("socket", (1,), ALLOWED),
            ("socket", (10,), ALLOWED),
            ("socket", (16,), errno.EPERM),
            ("read", (0,), ALLOWED),
        ):
            assert verdict(machine, has_namespace, name, *arguments) == expected, (name, arguments, has_namespace)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("has_namespace", [False, True])
def test_every_rule_is_in_the_filter(machine: str, has_namespace: bool) -> None:
    for name, rule in RULES.items():
        if not any(call.name == name and machine in call.numbers for call in system_calls()):
            continue
        checks = rule.namespaced if has_namespace else rule.checks
        if not checks:
            expected = rule.error if checks is None else ALLOWED
            assert verdict(machine, has_namespace, name, 77, 77) == expected, name
            continue
        inside = [0] * 6
        for check in checks:
            inside[check.argument] = check.ranges[0][0]
        assert verdict(machine, has_namespace, name, *inside) == ALLOWED, name
        for check in checks:
            outside = list(inside)
            outside[check.argument] = check.forbidden_bits or check.ranges[0][1] + 1
            assert verdict(machine, has_namespace, name, *outside) == rule.error, name


def test_unknown_system_calls_and_architectures_are_stopped() -> None:
    program = seccomp_filter(has_pid_namespace=True, machine="x86_64")
    assert run_filter(program, ARCHITECTURES["x86_64"], 1000, ()) == errno.ENOSYS
    assert run_filter(program, ARCHITECTURES["aarch64"], 0, ()) == -1  # killed
    assert run_filter(program, ARCHITECTURES["x86_64"], 0x40000000, ()) == -1


def python_of_nobody(directory: Path) -> tuple[list[str], dict[str, str]]:
    """A command that runs Python as the user nobody with ``zero2all.sandbox`` alone, and its environment."""
    if os.geteuid() != 0:
        pytest.skip("only root can become a different user")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    packages = directory / "packages"
    source = Path(zero2all.__file__).parent
    shutil.copytree(source / "sandbox", packages / "zero2all/sandbox")
    shutil.copytree(Path(__file__).parent, packages / "tests/sandbox")
    (packages / "zero2all/base").mkdir()
    for path in ("__init__.py", "base/__init__.py", "base/errors.py", "base/redact.py"):
        shutil.copy(source / path, packages / "zero2all" / path)
    try:
        import sandlock
    except ImportError:
        pass
    else:
        shutil.copytree(Path(sandlock.__file__).parent, packages / "sandlock")
    for parent in (directory, *directory.parents):
        if not parent.stat().st_mode & 1:
            parent.chmod(parent.stat().st_mode | 0o011)  # of pytest: only its owner can enter
    (directory / "tmp").mkdir()
    (directory / "tmp").chmod(0o777)
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    environment = {"PYTHONPATH": str(packages), "TMPDIR": str(directory / "tmp"), "PATH": "/usr/bin:/bin"}
    for python in (sys.executable, "/usr/bin/python3"):
        command = [*user, python]
        probe = "import sys, os; sys.exit(sys.version_info < (3, 11) or not os.access(sys.executable, os.X_OK))"
        if subprocess.run([*command, "-c", probe], env=environment, cwd=directory, capture_output=True).returncode == 0:
            return command, environment
    pytest.skip("nobody can run no Python here: those of root are in a directory of root")


@pytest.mark.parametrize("user", ["caller", "nobody"])
@pytest.mark.parametrize("backend", ["sandlock", "sandlock-host", "bubblewrap"])
def test_no_system_call_reaches_a_process_outside(backend: str, user: str, tmp_path: Path) -> None:
    command, environment = [sys.executable], dict(os.environ)
    if user == "nobody":
        command, environment = python_of_nobody(tmp_path)
    name, _, namespace = backend.partition("-")
    attacked = subprocess.run(
        [*command, "-m", "tests.sandbox.attack", name, namespace or "own"],
        env=environment,
        cwd=tmp_path if user == "nobody" else None,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "did not start" in attacked.stderr or "FileNotFoundError" in attacked.stderr:
        pytest.skip(f"{name} does not work here: {attacked.stderr.strip()[-300:]}")
    assert attacked.returncode == 0, attacked.stderr
    report = json.loads(attacked.stdout)
    assert report["status"] == "ok", report
    assert report["uid"] == (NOBODY if user == "nobody" else os.getuid())
    assert report["before"] == report["after"]
    assert report["exit"] == 0
    returned = report["returned"]
    assert len(returned) > 80
    inside = {"kill 1"} if namespace != "host" else set()  # all processes of the namespace
    assert {call for call, result in returned.items() if result >= 0} - SENDS_NOTHING == OWN | inside
