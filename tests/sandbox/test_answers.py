"""An answer is tested in a process of its own: it passes plain data, and cannot pass by anything else."""

from __future__ import annotations

import time

import pytest

from zero2all.sandbox import Limits, Sandbox

IMPOSSIBLE = "assert answer(1) == 'what no answer returns'"


def test_plain_data_crosses_unchanged(sandbox: Sandbox) -> None:
    tests = """
import math
for value in (
    None, True, 0, -1, 10**5000, 1.5, math.inf, 1 + 2j, "", "日\\ud800", b"\\0\\xff", bytearray(b"a"), [], [1, [2]],
    (1,), (),
    {1, "a"}, set(), frozenset([1, (2,)]), {}, {1: [2], (3, 4): {"a": None}, None: 5}, [[1, 2], (3, {4})],
):
    result = answer(value)
    assert result == value and type(result) is type(value), value
assert math.isnan(answer(math.nan))
assert answer(x=3) == 3
assert type(answer([True, 1, 1.0])[0]) is bool
"""
    result = sandbox.run_tests("def answer(x): return x", tests, "answer")
    assert result.status == "ok", result


def test_arguments_that_the_answer_changes_are_changed_in_the_tests(sandbox: Sandbox) -> None:
    answer = "def answer(a, b, c):\n  a.sort(); b['x'] = a; c.clear()\n  return a"
    tests = "a, b, c = [3, 1], {}, {1}\nanswer(a, b, c)\nassert (a, b, c) == ([1, 3], {'x': [1, 3]}, set())"
    assert sandbox.run_tests(answer, tests, "answer").status == "ok"
    assert sandbox.run_tests(answer, "a = [3, 1]\nanswer(a, {}, {1})\nassert a == [3, 1]", "answer").status == "failed"


def test_errors_of_the_answer_are_raised_in_the_tests(sandbox: Sandbox) -> None:
    answer = "class Bad(ValueError): pass\ndef answer(x):\n  if x: raise Bad('no')\n  raise KeyError('k')"
    tests = """
for value, kind in ((1, ValueError), (0, KeyError)):
    try:
        answer(value)
    except kind as error:
        assert type(error) is kind
    else:
        assert False
"""
    assert sandbox.run_tests(answer, tests, "answer").status == "ok"
    assert sandbox.run_tests(answer, "answer(1)", "answer").status == "failed"


def test_tests_may_use_what_their_context_defines(sandbox: Sandbox) -> None:
    context = "def encode(s): return s[::-1]\ndef answer(s):\n  '''Decode.'''\n"
    tests = "def check(candidate):\n  assert candidate(encode('ab')) == 'ab'\ncheck(answer)"
    assert sandbox.run_tests("def answer(s): return s[::-1]", tests, "answer", context).status == "ok"
    assert sandbox.run_tests("def encode(s): return s\nanswer = encode", tests, "answer", context).status == "failed"


CATCHES_ALL = "\ntry:\n  {}\nexcept BaseException:\n  pass\n"


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        ("class C: pass\ndef answer(x): return C()", "answer(1)"),
        ("def answer(x): yield x", "answer(1)"),
        ("def answer(x): return [lambda: 1]", "answer(1)"),
        ("def answer(x): a = []; a.append(a); return a", "answer(1)"),
        ("def answer(x): return 1", "answer(lambda: 1)"),
        ("def answer(x): x.append(object())", "answer([])"),
    ],
)
def test_more_than_plain_data_is_unsupported_and_never_passes(any_sandbox: Sandbox, answer: str, tests: str) -> None:
    assert any_sandbox.run_tests(answer, tests, "answer").status == "unsupported"
    assert any_sandbox.run_tests(answer, CATCHES_ALL.format(tests), "answer").status == "unsupported"


FRAME = "import sys, os\nm = sys._getframe(2).f_locals['mark']\nos.write(1, (m + 'ok').encode())\nos._exit(0)\n"
FORGERIES = {
    "mark in a frame": FRAME,
    "mark in any frame": """
import os, sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, (str, bytes)):
            mark = value if isinstance(value, bytes) else value.encode('latin-1', 'replace')
            for stream in range(1, 16):
                try: os.write(stream, mark + b'ok')
                except OSError: pass
    frame = frame.f_back
os._exit(0)
""",
    "status to every descriptor": """
import os
for stream in range(3, 16):
    try: os.write(stream, b'ok')
    except OSError: pass
os._exit(0)
""",
    "patched builtins": """
import builtins, json, os, sys
builtins.AssertionError = builtins.print = lambda *a, **k: True
builtins.compile = lambda *a, **k: (lambda: None).__code__
builtins.exec = lambda *a, **k: None
json.dumps = lambda *a, **k: '{"status": "ok"}'
os._exit = lambda code: None
main = sys.modules['__main__']
def answer(x): return True
""",
    "equal to everything": """
class Equal(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = str.__hash__
def answer(x): return Equal('x')
""",
    "equal to everything, an object": """
class Equal:
    def __eq__(self, other): return True
def answer(x): return Equal()
""",
    "exit at definition": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef answer(x): os._exit(0)",
    "SystemExit in the call": "def answer(x): raise SystemExit(0)",
    "exit by the parent": """
import os, signal
def answer(x):
    os.kill(os.getppid(), signal.SIGKILL)
""",
    "messages of its own": """
import os, struct
def message(text): return struct.pack('>I', len(text)) + text
def answer(x):
    for text in (b'{"status": "ok"}', b'{"end": "ok"}', b'[]', b'ok', b'{"result": ["str", "x"], "changed": null}'):
        for stream in range(1, 16):
            try: os.write(stream, message(text))
            except OSError: pass
""",
    "the length of no message": """
import os
def answer(x):
    for stream in range(1, 16):
        try: os.write(stream, b'\\xff' * 300)
        except OSError: pass
""",
    "too much": "def answer(x): return 'x' * 20_000_000",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_forgery_passes(any_sandbox: Sandbox, forgery: str) -> None:
    assert any_sandbox.run_tests(FORGERIES[forgery], IMPOSSIBLE, "answer").status != "ok"
    assert (
        any_sandbox.run_tests(FORGERIES[forgery], CATCHES_ALL.format("answer(1)") + IMPOSSIBLE, "answer").status != "ok"
    )


def test_the_forgeries_fail_in_every_sandbox(sandbox: Sandbox) -> None:
    for forgery in ("mark in a frame", "patched builtins", "equal to everything", "exit in the call"):
        assert sandbox.run_tests(FORGERIES[forgery], IMPOSSIBLE, "answer").status in ("failed", "killed")
    assert sandbox.run_python(FRAME + "assert False").status != "ok"


def test_an_answer_that_does_not_end_is_a_timeout(any_sandbox: Sandbox) -> None:
    sandbox = Sandbox(any_sandbox.backend, Limits(seconds=1))
    for answer in ("def answer(x):\n  while True: pass", "while True: pass", "def answer(x): return x * 0"):
        tests = "answer([0])" if "0" not in answer else "while True: answer([1])"
        started = time.monotonic()
        assert sandbox.run_tests(answer, tests, "answer").status == "timeout"
        assert time.monotonic() - started < 30


def test_an_answer_without_the_function_or_with_a_mistake_fails(any_sandbox: Sandbox) -> None:
    for answer in ("", "def answer(:", "1 / 0", "answer = 3"):
        result = any_sandbox.run_tests(answer, CATCHES_ALL.format("answer(1)") + "\nanswer(2)", "answer")
        assert result.status == "failed", (answer, result)
    assert "ZeroDivisionError" in any_sandbox.run_tests("1 / 0", "answer(1)", "answer").stderr
