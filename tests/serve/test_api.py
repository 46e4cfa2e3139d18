"""The official client of OpenAI against ``z2a serve``, and against llama.cpp's server where that has the feature."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
import torch

from tests.serve.servers import KEY, Served, wait_until_idle
from zero2all.export import export_run
from zero2all.generation import SamplingParams, generate_batch
from zero2all.serve.engine import Engine
from zero2all.tokenizer.vocabulary import TOOL_CALL, TOOL_CALL_END
from zero2all.train import Run

openai = pytest.importorskip("openai", reason="the openai client is not installed")
QUESTION = [{"role": "user", "content": "二加二等于几？"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def llama_cpp(served_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (xllamacpp)")
    from zero2all.export.parity import LlamaCpp

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


def test_echo_gives_the_log_probabilities_of_the_prompt(ours: Any, served_run: Run) -> None:
    """As lm-eval asks for them. The prompt is longer than one part of the prefill."""
    model, tokenizer = served_run.load_model(), served_run.tokenizer()
    for text, parts in (("the model reads a text and says what comes next", 0), ("the model " * 170, 1)):
        ids = [tokenizer.eos_token_id, *tokenizer.encode(text)][:400]
        assert len(ids) > 300 * parts
        answer = ours.completions.create(
            model="tiny", prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True
        ).choices[0]
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids]))[0, :, : tokenizer.vocab_size].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        found = answer.logprobs.token_logprobs
        assert found[0] is None
        assert len(found) == len(ids) + 1
        torch.testing.assert_close(torch.tensor(found[1:-1]), expected, atol=1e-4, rtol=0)
        best = [max(top.values()) for top in answer.logprobs.top_logprobs[1:-1]]
        torch.testing.assert_close(torch.tensor(best), logprobs[:-1].amax(-1), atol=1e-4, rtol=0)
        assert answer.text.startswith(tokenizer.decode(ids))


def test_a_prompt_alone_can_be_scored(ours: Any) -> None:
    answer = ours.completions.create(model="tiny", prompt="the model", max_tokens=0, logprobs=0, echo=True).choices[0]
    assert answer.text == "the model"
    assert len(answer.logprobs.token_logprobs) == len(answer.logprobs.tokens) > 1
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_those_of_the_text_also_where_tokens_are_parts_of_characters(ours: Any, stream: bool) -> None:
    prompt = "春眠🙂 the"
    found = ours.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, temperature=0, logprobs=0, echo=True, stream=stream
    )
    choices = [part.choices[0] for part in found] if stream else [found.choices[0]]
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    text = "<|endoftext|>" + "".join(choice.text for choice in choices)
    assert offsets == sorted(offsets)
    assert tokens[0] == text[: offsets[1]]
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert text[offset : offset + len(token)] == token


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


def test_answers_follow_a_json_schema(ours: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "小明"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for seed in range(4):
        answer = ours.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=120, seed=seed, response_format=wanted
        ).choices[0]
        assert answer.finish_reason == "stop"
        person = json.loads(answer.message.content)
        assert person["name"] in ("Ada", "小明")
        assert 1 <= person["age"] <= 9
    with pytest.raises(openai.BadRequestError, match="JSON schema"):
        ours.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}},
        )


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

    def choose(first: int, logits: torch.Tensor, broken: dict[int, Exception]) -> Any:
        chosen = original(first, logits, broken)
        allowed = decoder._mask_forbidden(first, logits, broken)
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


def test_models_and_tokens(ours: Any, server: Served) -> None:
    assert [model.id for model in ours.models.list()] == ["tiny"]
    assert ours.models.retrieve("tiny").owned_by == "zero2all"
    tokenizer = server.model.tokenizer
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as http:
        found = http.post("/tokenize", json={"prompt": "你好 <|im_end|>"}).json()
        assert found["tokens"] == [tokenizer.eos_token_id, *tokenizer.encode("你好 <|im_end|>")]
        assert http.post("/detokenize", json={"tokens": found["tokens"][1:]}).json()["prompt"] == "你好 <|im_end|>"
        chat = http.post("/tokenize", json={"messages": QUESTION}).json()
        assert chat["tokens"] == tokenizer.render_chat(QUESTION, add_generation_prompt=True)


def test_metrics_and_health(ours: Any, server: Served) -> None:
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
    with Engine(served_run.load_model(), served_run.tokenizer(), rows=1, max_waiting=1):
        pass
    assert chosen == [(3, "engine")]
