"""A server with a tiny model in this process, and what clients do to it."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn

from isotron.inference.config import EngineConfig
from isotron.inference.engine import Engine
from isotron.serve.app import Server, build
from isotron.serve.chat import PLAIN, Template
from isotron.serve.config import Limits
from isotron.serve.protocol import Defaults
from isotron.serve.worker import Worker
from isotron.tokenizers.null import NullTokenizer
from tests.generation import make_model


class Letters(NullTokenizer):
    """One token per ASCII character; 0 ends a document."""

    def __init__(self, size: int = 131) -> None:
        super().__init__(size)
        self.eod = 0

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text if 0 < ord(c) < 128]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) if 0 < i < 128 else "" for i in ids)


def make_server(**changes: Any) -> Server:
    """A server whose worker has not been started."""
    engine = Engine(make_model("llama", "float32"), Letters(), EngineConfig(rows=4, page=4, chunk=16))
    worker = Worker(engine, 160)
    limits = Limits(max_waiting=60, max_answers=8, max_body=4096, grace=5)
    server = Server(worker, engine, engine.tokenizer, Template(PLAIN, {}), "tiny", limits, Defaults(frozenset({0}), 8))
    return replace(server, **changes)


@contextmanager
def listening(server: Server) -> Iterator[tuple[str, int]]:
    """The address of a running server."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    http_server = uvicorn.Server(uvicorn.Config(build(server), log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=http_server.run, args=([sock],), daemon=True)
    server.worker.start()
    thread.start()
    while not http_server.started:
        time.sleep(0.01)
    try:
        yield sock.getsockname()
    finally:
        http_server.should_exit = True
        thread.join(20)
        server.worker.stop()
        sock.close()


def call(address: tuple[str, int], method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and body of one request; bytes are sent as they are."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text[:1] in b"{[" else text.decode()


def metrics(address: tuple[str, int]) -> dict[str, float]:
    """Every metric."""
    _, text = call(address, "GET", "/metrics")
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def settled(address: tuple[str, int], seconds: float = 10.0) -> dict[str, float]:
    """The metrics once nothing is under way."""
    end = time.monotonic() + seconds
    while True:
        found = metrics(address)
        if not found["isotron_answers_pending"] and not found["isotron_cache_pages_used"]:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"still under way after {seconds} s: {found}")
        time.sleep(0.05)


# ---- a crowd of clients --------------------------------------------------------------------------------------------

BROKEN = (
    (b"{", 400), (b"[]", 400), (b'{"prompt": 3}', 400), (b'{"prompt": "x", "max_tokens": 100000}', 400),
    (b'{"prompt": "x", "temperature": -1}', 400), (b'{"prompt": [999999]}', 400), (b'{"prompt": "x", "n": 1000}', 400),
    (b'{"prompt": "x", "what": 1}', 400), (b'{"prompt": "x", "model": "other"}', 404), (b"\xff\xfe", 400),
)  # fmt: skip


def crowd(address: tuple[str, int], clients: int, seconds: float, longest: int = 12) -> dict[str, Any]:
    """`clients` threads for so many seconds: good requests, streams that are dropped midway, broken bodies.

    Returns latencies in seconds of the good ones, how often each thing happened, and every answer that was not right.
    """
    end, lock = time.monotonic() + seconds, threading.Lock()
    found: dict[str, Any] = {"latencies": [], "good": 0, "dropped": 0, "broken": 0, "busy": 0, "wrong": []}

    def note(kind: str, latency: float | None = None, wrong: str = "") -> None:
        with lock:
            found[kind] += 1
            if latency is not None:
                found["latencies"].append(latency)
            if wrong:
                found["wrong"].append(wrong)

    def client(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            one(chance)

    def one(chance: random.Random) -> None:
        kind, start = chance.random(), time.monotonic()
        if kind < 0.2:
            body, right = chance.choice(BROKEN)
            status, _ = call(address, "POST", "/v1/completions", body)
            note("broken", wrong="" if status == right else f"{body!r} gave {status}")
        elif kind < 0.4:
            _drop(address, chance, longest)
            note("dropped")
        else:
            text = "".join(chance.choice("abcdef ") for _ in range(chance.randint(1, longest)))
            body = {"prompt": text, "max_tokens": chance.randint(1, longest), "seed": 1}
            status, reply = call(address, "POST", "/v1/completions", body)
            if status == 429:
                note("busy")
                time.sleep(0.05)
            else:
                note("good", time.monotonic() - start, "" if status == 200 else f"{body} gave {status}: {reply}")

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _drop(address: tuple[str, int], chance: random.Random, longest: int) -> None:
    """Begin a stream and close the connection before it ends."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    body = {"prompt": "a" * chance.randint(1, longest), "max_tokens": longest, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if chance.random() < 0.7:
        connection.getresponse().read(chance.randint(1, 200))
    connection.close()
