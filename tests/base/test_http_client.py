"""Requests with a body: to webhooks, model servers and llama.cpp, which may be slow, broken or hostile."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable

import pytest

from tests.corpus.test_fetch import raw_server
from zero2all.base.network import http_client
from zero2all.base.network.http_client import HttpClient, HttpError, TransientError, UnansweredError
from zero2all.base.network.openai_client import API_KEY, Endpoint


def answering(head: str, body: bytes = b"", *, drip: bool = False) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)
        while drip:
            connection.sendall(b"x" * 2000)
            time.sleep(0.05)

    return answer


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_neither_body_nor_key_elsewhere(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def elsewhere(connection: socket.socket) -> None:
        seen.append(b"asked")

    monkeypatch.setenv(API_KEY, "secret-key")
    with raw_server(elsewhere, "127.0.0.2") as other:
        answer = answering(f"{status} Moved\r\nLocation: {other}/v1\r\nContent-Length: 0")
        with raw_server(answer) as url, pytest.raises(http_client.Z2aError, match=f"HTTP {status}") as error:
            Endpoint(url).post("completions", {"prompt": "private"})
    assert not seen
    assert "secret-key" not in str(error.value)


def test_a_reply_has_to_end_within_the_time() -> None:
    started = time.monotonic()
    with (
        raw_server(answering("200 OK", drip=True)) as url,
        pytest.raises(TransientError, match="the answer is too slow"),
    ):
        HttpClient(0.5).post(url, content=b"{}")
    assert time.monotonic() - started < 15


def test_a_reply_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_REPLY_BYTES", 1000)
    with raw_server(answering("200 OK", bytes(5000))) as url, pytest.raises(HttpError, match="longer than 1000 bytes"):
        HttpClient(20.0).post(url, content=b"{}")


@pytest.mark.parametrize("body", [b"<html>", b"[" * 100_000], ids=["html", "deep"])
def test_an_answer_that_is_not_json_is_asked_for_again(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.001)
    answer, message = answering(f"200 OK\r\nContent-Length: {len(body)}", body), "not JSON, 6 times in a row"
    with raw_server(answer) as url, pytest.raises(UnansweredError, match=message):
        Endpoint(url).post("completions", {})


def test_errors_quote_nothing_that_the_server_echoes() -> None:
    """A server may send what it got, such as the key, as a header that is not valid."""
    with raw_server(answering("200 OK\r\nsecret key: \x00")) as url, pytest.raises(TransientError) as error:
        HttpClient(20.0).post(url, content=b"{}")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "gopher://127.0.0.1"])
def test_a_proxy_that_cannot_be_used_is_an_error_of_the_user(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(http_client.UsageError, match="a proxy of the environment cannot be used"):
        HttpClient(1.0)
