"""Templates of strangers: each takes at most its limits, and only its child process suffers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from zero2all.tokenizer import chat
from zero2all.tokenizer.chat import (
    ChatInput,
    ChatTemplate,
    ChatTemplateError,
    RenderedChat,
    TemplateLimitError,
    shared_process,
)

QUESTION = [{"role": "user", "content": "hello"}]
SPIN = "{{ range(99999) | reject('in', range(-99999, 0) | list) | list | length }}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = {
    "joined to itself": "{% set n=namespace(x='a'*99) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "added to itself": "{% set ns=namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "ljust": "{{ 'x'.ljust(2000000000) | length }}",
    "zfill": "{{ '1'.zfill(2000000000) | length }}",
    "center filter": "{{ 'x' | center(2000000000) }}",
    "percent": "{{ ('%2000000000d' % 1) | length }}",
    "format": "{{ '{:>2000000000}'.format(1) | length }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) | length }}",
    "indented text": "{{ ('a\n' * 100000) | indent(1000000) | length }}",
    "indented JSON": "{{ [1, 2] | tojson(indent=2000000000) | length }}",
    "expanded tabs": "{{ ('\t' * 1000000).expandtabs(1000000) | length }}",
    "a long output": "{% for i in range(90000) %}{{ 'a' * 100000 }}{% endfor %}",
    "mapped": "{{ range(99999) | map('string') | map('center', 100000) | join | length }}",
}
TIME = {
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "lipsum": "{{ lipsum(n=100000, min=1000, max=2000) | length }}",
    "sum of lists": "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
    "reject": SPIN,
}
EITHER = {  # or refused before it takes any
    "loops": LOOPS,
    "loops that set": LOOPS.replace("{% endfor %}{% endfor %}", "{% set x = b %}{% endfor %}{% endfor %}x"),
    "loops after a name": "{% set _tick = 1 %}" + LOOPS,
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "repeated text": "{{ 'a' * 10 ** 10 }}",
    "repeated list": "{{ [0] * 999999999 }}",
    "power": "{{ 9 ** 999999999 }}",
}


def render(source: str, messages: list[dict[str, Any]] = QUESTION) -> str:
    return "".join(ChatTemplate(source, frozenset({"<|im_end|>"}), {}, "the template of here").render(messages).parts)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 1)
    monkeypatch.setattr(chat, "MAX_MEMORY", 192 << 20)
    monkeypatch.setattr(chat, "WALL_FACTOR", 60)  # a busy machine may take long to start a process
    shared_process().close()  # the next one has the limits above


@pytest.fixture(autouse=True)
def fresh() -> Any:
    yield
    shared_process().close()


@pytest.mark.parametrize("name", [*MEMORY, *TIME, *EITHER])
@pytest.mark.timeout(120)
def test_a_template_gets_no_more_than_its_limits(strict: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    said = r"(needs more than 192 MiB|exceeds its limits)"
    if name in TIME:
        monkeypatch.setattr(chat, "MAX_MEMORY", 1 << 30)
        said = "exceeds its limits: it takes more than 1 s"
    error, said = (ChatTemplateError, "") if name in EITHER else (TemplateLimitError, f"the template of here {said}")
    with pytest.raises(error, match=said):
        render((MEMORY | TIME | EITHER)[name])
    assert render("{{ messages[0].content }}") == "hello"


@pytest.mark.timeout(60)
def test_a_child_that_stands_still_is_ended(strict: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses no CPU time, so no limit of the kernel ends it."""
    render("a")
    process = shared_process()._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(chat, "WALL_FACTOR", 0.5)
        with pytest.raises(TemplateLimitError, match="takes more than 1 s"):
            render("a")
    assert render("b") == "b"


@pytest.mark.timeout(60)
def test_one_conversation_over_the_limit_does_not_stop_the_others(strict: None) -> None:
    source = "{% if messages[0].content == 'bad' %}" + SPIN + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, frozenset(), {})
    said = ["a", "bad", "b", "c"]
    found = template.render_many([ChatInput([{"role": "user", "content": text}]) for text in said])
    assert isinstance(found[1], TemplateLimitError)
    assert [chat.parts for chat in found if isinstance(chat, RenderedChat)] == [["a"], ["b"], ["c"]]


def test_a_batch_larger_than_a_message_is_rendered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MESSAGE_BYTES", 100)
    inputs = [ChatInput([{"role": "user", "content": f"{number}" * (number % 70)}]) for number in range(200)]
    found = ChatTemplate("{{ messages[0].content }}", frozenset(), {}).render_many(inputs)
    expected = [one.messages[0]["content"] for one in inputs]
    assert [chat.parts[0] for chat in found if isinstance(chat, RenderedChat)] == expected


@pytest.mark.parametrize("said", ["\ud800", "\n\u2028\x00\x85", "😀", "a\ud83d", '"\\'])
def test_any_text_crosses_the_pipe(said: str) -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": said}]) == said


def test_threads_share_the_child() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: render(f"{{{{ {number} }}}}"), range(64)))
    assert found == [str(number) for number in range(64)]


def test_a_forked_process_has_a_child_of_its_own() -> None:
    assert render("a") == "a"
    ours = shared_process()._process
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(render, ["{{ 1 }}", "{{ 2 }}", "{{ 3 }}"]) == ["1", "2", "3"]
    assert render("b") == "b"
    assert shared_process()._process is ours


PARENT = """
import sys, threading, time
from zero2all.tokenizer.chat import ChatTemplate
from zero2all.tokenizer.chat import shared_process
template = ChatTemplate("a", frozenset(), {})
threading.Thread(target=template.render, args=([],)).start()  # a thread that ends must not take the child with it
time.sleep(0.1)
while shared_process()._process is None:
    time.sleep(0.01)
template.render([])
print(shared_process()._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(60)
def test_no_child_is_left_after_its_parent_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Path("/proc") / parent.stdout.readline().strip()
        assert child.exists()
        parent.kill()
    deadline = time.monotonic() + 30
    while child.exists() and "Z" not in child.joinpath("stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_child_sees_no_credentials_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    shared_process().close()
    render("a")
    process = shared_process()._process
    assert process is not None
    place = Path(f"/proc/{process.pid}")
    assert b"AWS" not in (place / "environ").read_bytes()
    opened = {os.readlink(one) for one in (place / "fd").iterdir()}
    assert all(one == "/dev/null" or one.startswith(("socket:", "pipe:")) for one in opened)


def test_what_no_child_could_render_is_an_error() -> None:
    """A template of megabytes, and messages that use every disguise."""
    with pytest.raises(ChatTemplateError, match="more than 1,048,576 characters"):
        render("a" * (20 << 20))
    said = "".join(map(chr, range(0x100000, 0x10FFFE)))
    with pytest.raises(ChatTemplateError, match="private-use characters"):
        render("{{ messages[0].content }}", [{"role": "user", "content": said}])
