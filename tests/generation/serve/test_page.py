"""The chat page in a real browser. Z2A_SCREENSHOTS=DIR keeps pictures; Z2A_SCREENSHOT_RUN=RUN shows that model."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.generation.serve.servers import KEY, Served, serve, wait_until_idle
from tests.track.browser import browser, cleaned, complaints
from zero2all.generation.serve.api_answers import ServedModel
from zero2all.generation.serve.engine import ServingEngine
from zero2all.train import Run

pytestmark = pytest.mark.slow
NASTY = "<img src=x onerror=\"document.title='broken'\">"
PHONE, DESKTOP = (390, 844), (1200, 800)


@pytest.fixture(scope="module")
def shown(server: Served) -> Iterator[Served]:
    if "Z2A_SCREENSHOT_RUN" not in os.environ:
        yield server
        return
    run = Run.open(os.environ["Z2A_SCREENSHOT_RUN"])
    engine = ServingEngine(run.load_model(), run.tokenizer(), rows=2, max_waiting=8)
    with serve(engine, ServedModel(run.recipe.name, run.tokenizer(), None)) as served:
        yield served


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    with cleaned(chromium) as opened:
        yield opened


def until(page: Any, script: str, seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := page.execute_script(script)):
        assert time.monotonic() < end, f"never true: {script}\n{page.find_element('tag name', 'body').text}"
        time.sleep(0.05)
    return found


def picture(page: Any, name: str) -> None:
    if folder := os.environ.get("Z2A_SCREENSHOTS"):
        page.save_screenshot(str(Path(folder) / f"{name}.png"))


def write(page: Any, text: str) -> None:
    page.find_element("id", "text").send_keys(text + "\n")


def answered(page: Any, count: int) -> None:
    notes = f"document.querySelectorAll('.note').length === {count}"
    until(page, f"return {notes} && !document.getElementById('send').hidden")


def texts_of(page: Any, selector: str) -> Any:
    return page.execute_script(f"return [...document.querySelectorAll('{selector}')].map(one => one.textContent)")


def set_values(page: Any, **values: float) -> None:
    for name, value in values.items():
        page.execute_script(f"document.getElementById('{name}').value = {value}")


@pytest.mark.parametrize(("language", "size"), [("en", DESKTOP), ("zh", PHONE)])
def test_a_conversation(page: Any, shown: Served, language: str, size: tuple[int, int]) -> None:
    page.set_window_size(*size)
    page.get(f"{shown.url}/#key={KEY}&lang={language}")
    until(page, f"return document.title === '{shown.model.name}'")
    assert KEY not in page.current_url
    assert page.execute_script("return document.documentElement.lang") == language
    picture(page, f"empty-{language}")
    set_values(page, max_tokens=40)
    questions = {"en": ["Tell me a story.", NASTY], "zh": ["讲一个故事。", NASTY]}[language]
    for count, question in enumerate(questions, 1):
        write(page, question)
        answered(page, count)
    assert texts_of(page, ".user") == questions
    assert page.title == shown.model.name
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    picture(page, f"chat-{language}")
    page.find_element("id", "language").click()
    other = {"en": "新对话", "zh": "New chat"}[language]
    assert page.find_element("id", "reset").text == other
    page.find_element("id", "reset").click()
    assert page.execute_script("return document.querySelectorAll('.message').length") == 0
    assert complaints(page) == []


def test_an_empty_answer_and_an_error_stay_in_view(page: Any, server: Served) -> None:
    """A model may end its answer at the first token. The next message must not take the earlier ones away."""
    page.get(f"{server.url}/#key={KEY}&lang=en")
    until(page, "return document.title === 'tiny'")
    page.execute_script(
        """
        const usage = {choices: [], usage: {completion_tokens: 1}};
        const answers = [
            () => new Response(`data: ${JSON.stringify(usage)}\n\ndata: [DONE]\n\n`),
            () => new Response(JSON.stringify({error: {message: "busy"}}), {status: 503}),
        ];
        const real = window.fetch;
        window.bodies = [];
        window.fetch = async (url, options) => {
            window.bodies.push(JSON.parse(options.body));
            return answers.length ? answers.shift()() : real(url, options);
        };
        document.getElementById('max_tokens').value = 4;
        """
    )
    write(page, "no answer")
    answered(page, 1)
    assert "The answer is empty." in page.find_element("id", "messages").text
    page.find_element("id", "language").click()
    write(page, "an error")
    until(page, "return document.querySelector('.error')")
    write(page, "an answer")
    answered(page, 2)
    assert texts_of(page, ".user") == ["no answer", "an error", "an answer"]
    assert page.find_element("css selector", ".error").text == "busy"
    sent = page.execute_script("return window.bodies.map(body => body.messages.map(one => one.content))")
    assert sent == [["no answer"], ["an error"], ["an answer"]], "templates take turns only: user, assistant, user"


@pytest.mark.parametrize(("language", "said"), [("en", "base model"), ("zh", "基座模型")])
def test_a_base_model_is_named_and_its_page_completes_text(
    page: Any, served_run: Run, language: str, said: str
) -> None:
    tokenizer = served_run.tokenizer()
    engine = ServingEngine(served_run.load_model(), tokenizer, rows=2, max_waiting=8)
    with serve(engine, ServedModel("base", tokenizer, tokenizer.eos_token_id, is_base=True)) as served:
        page.get(f"{served.url}/#key={KEY}&lang={language}")
        notice = "const one = document.getElementById('base'); return !one.hidden && one.textContent"
        assert said in until(page, notice)
        set_values(page, max_tokens=20, temperature=0)  # a random first token may be the end
        write(page, "Once upon a time")
        answered(page, 1)
        [shown] = texts_of(page, ".message")
        assert shown.startswith("Once upon a time")
        assert len(shown) > len("Once upon a time")
        assert engine.stats.prompt_tokens == 1 + len(tokenizer.encode("Once upon a time"))  # no template around it
        page.find_element("id", "mode").click()
        write(page, "a question")
        answered(page, 1)
        assert len(page.find_elements("css selector", ".user")) == 1
        assert complaints(page) == []


def test_an_answer_can_be_stopped_and_frees_its_slot(
    page: Any, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = server.engine._decoder.step
    monkeypatch.setattr(server.engine._decoder, "step", lambda: (time.sleep(0.5), step())[1])  # 200 s in all
    page.get(f"{server.url}/#key={KEY}")
    until(page, "return document.title === 'tiny'")
    set_values(page, max_tokens=400, temperature=2)
    write(page, "a long answer")
    until(page, "return document.getElementById('send').hidden")
    page.find_element("id", "stop").click()
    until(page, "return !document.getElementById('send').hidden")
    wait_until_idle(server.engine)


def test_without_the_key_it_says_where_the_key_is(page: Any, server: Served) -> None:
    page.get(f"{server.url}/#lang=en")
    assert "z2a serve" in until(page, "return document.querySelector('.error')?.textContent")


def test_the_page_loads_nothing_from_elsewhere_and_cannot_be_framed(server: Served) -> None:
    answer = httpx.get(server.url, trust_env=False)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-inline'; script" not in policy
    assert "http" not in answer.text.replace("http-equiv", "")
    assert KEY not in answer.text
