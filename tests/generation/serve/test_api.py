"""The official client of OpenAI against ``z2a serve``, and against llama.cpp's server where that has the feature."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
import torch

from tests.generation.serve.servers import KEY, Served, wait_until_idle
from zero2all.export import export_run
from zero2all.generation import SamplingParams, generate_batch
from zero2all.generation.serve.engine import ServingEngine
from zero2all.tokenizer.vocabulary import TOOL_CALL, TOOL_CALL_END
from zero2all.train import Run

openai = pytest.importorskip("openai", reason="the openai client is not installed")
QUESTION = [{"role": "user", "content": "二加二等于几？"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def llama_cpp(served_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (xllamacpp)")
    from zero2all.export.run_export import LlamaCpp

    out = tmp_path_factory.mktemp("gguf")
    export_run(served_run, out / "gguf", format="gguf", dtype="f32", check=False)
    return LlamaCpp(next((out / "gguf").glob("*.gguf")), slots=4)


@pytest.fixture(params=["z2a", "llama.cpp"])
def client(request: pytest.FixtureRequest, server: Served) -> Any:
    url = server.url if request.param == "z2a" else request.getfixturevalue("llama_cpp").address
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60, http_client=_plain_http())


@pytest.fixture
def ours(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60, http_client=_plain_http())


def _plain_http() -> httpx.Client:
    return httpx.Client(trust_env=False)


def test_a_chat_answer_and_its_usage(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=12, temperature=0, seed=1)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 1 <= answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_answer_in_parts(client: Any) -> None:
    options = {"model": "tiny", "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**options)
    parts = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == (whole.choices[0].message.content or "")
    reasons = [part.choices[0].finish_reason for part in parts if part.choices and part.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_with_several_choices(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt="the model", max_tokens=8, n=3, temperature=1.0, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(client: Any) -> None:
    options = {"model": "tiny", "prompt": "the model", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[2:5]
    assert stop
    cut = client.completions.create(**options, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


def test_log_probabilities_of_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    for one in answer.choices[0].logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == pytest.approx(max(top.logprob for top in one.top_logprobs), abs=1e-3)
        assert one.logprob <= 0


def test_greedy_answers_are_those_of_the_library(ours: Any, served_run: Run) -> None:
    prompts = ["the model", "春眠不觉晓", "def f1(x):"]
    params = SamplingParams(max_tokens=20, temperature=0)
    expected = generate_batch(served_run.load_model(), served_run.tokenizer(), prompts, params)
    answer = ours.completions.create(model="tiny", prompt=prompts, max_tokens=20, temperature=0)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert [choice.finish_reason for choice in answer.choices] == [one.finish_reason for one in expected]


def test_a_seed_repeats_an_answer_and_without_one_answers_differ(ours: Any) -> None:
    options = {"model": "tiny", "prompt": "the", "max_tokens": 16, "temperature": 1.0}
    first, second = (ours.completions.create(**options, seed=7).choices[0].text for _ in range(2))
    assert first == second
    assert len({ours.completions.create(**options).choices[0].text for _ in range(4)}) > 1


def test_without_a_seed_rows_are_sampled_together(server: Served, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = server.engine._decoder
    original, sizes = decoder._tensors.choose, []
    monkeypatch.setattr(
        decoder._tensors,
        "choose",
        lambda rows, logits, params: (sizes.append(len(logits)), original(rows, logits, params))[1],
    )
    ours.completions.create(model="tiny", prompt="the", max_tokens=6, n=4, temperature=1.0)
    assert max(sizes) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_parsed_back(
    ours: Any, server: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model has learned no calls, so its tokens are replaced by those of one."""
    tokenizer = server.model.tokenizer
    special, body = tokenizer.special_ids, '\n{"name": "weather", "arguments": {"city": "上海"}}\n'
    ids = [*tokenizer.encode("Let me look. "), special[TOOL_CALL], *tokenizer.encode(body), special[TOOL_CALL_END]]
    ids.append(special["<|im_end|>"])
    decoder = server.engine._decoder
    original, seen = decoder._choose, []

    def choose(first: int, logits: torch.Tensor) -> Any:
        chosen = original(first, logits)
        allowed = decoder._mask_forbidden(first, logits)
        assert allowed[0, ids[len(seen)]] > -1e30
        chosen.tokens_B[0] = ids[len(seen)]
        seen.append(1)
        return chosen

    monkeypatch.setattr(decoder, "_choose", choose)
    options = {"model": "tiny", "messages": QUESTION, "tools": [TOOL], "max_tokens": 100}
    if stream:
        parts = [part.choices[0] for part in ours.chat.completions.create(**options, stream=True)]
        content = "".join(part.delta.content or "" for part in parts)
        [call] = [call for part in parts for call in part.delta.tool_calls or []]
        reason = parts[-1].finish_reason
    else:
        choice = ours.chat.completions.create(**options).choices[0]
        content, [call], reason = choice.message.content, choice.message.tool_calls, choice.finish_reason
    assert content.strip() == "Let me look."
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "上海"})
    assert reason == "tool_calls"


def test_messages_of_every_role_are_taken(ours: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "上海"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    answer = ours.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], max_tokens=4)
    assert answer.usage.prompt_tokens > 40


def test_models_metrics_and_health(ours: Any, server: Served) -> None:
    assert [model.id for model in ours.models.list()] == ["tiny"]
    assert ours.models.retrieve("tiny").owned_by == "zero2all"
    ours.completions.create(model="tiny", prompt="a", max_tokens=2)
    wait_until_idle(server.engine)
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/metrics").status_code == 401
        text = http.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["zero2all_serve_requests_completed_total"]) >= 1
    assert float(values["zero2all_serve_slots_used"]) == 0
    assert 'zero2all_serve_first_token_seconds{quantile="0.99"}' in values


def test_the_engine_generates_on_the_device_of_its_model(served_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread().name))
    )
    with ServingEngine(served_run.load_model(), served_run.tokenizer(), rows=1, max_waiting=1):
        pass
    assert chosen == [(3, "engine")]
