"""The HTTP side: FastAPI routes over a `Worker`.

A request is checked as a whole before any of it reaches the engine; whatever is wrong with it is answered to its sender
and nobody else notices. A client that goes away frees its rows after the pass that is under way.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from isotron.core.errors import Refused
from isotron.inference.config import Wish
from isotron.inference.engine import Engine
from isotron.serve import protocol
from isotron.serve.chat import Template
from isotron.serve.config import Limits
from isotron.serve.metrics import Counters, render
from isotron.serve.page import PAGE
from isotron.serve.protocol import Bad, Defaults
from isotron.serve.reply import Answer, Form, event, usage
from isotron.serve.worker import Piece, Worker
from isotron.tokenizers.base import Tokenizer, need_library

GONE = 499  # the status of a request whose client has left; nobody reads it


@dataclass
class Server:
    """What the routes share. `prefix`: tokens that begin every text of a model that came from elsewhere."""

    worker: Worker
    engine: Engine
    tokenizer: Tokenizer
    template: Template
    name: str
    limits: Limits
    given: Defaults
    prefix: list[int] = field(default_factory=list)
    api_key: str = ""
    counters: Counters = field(default_factory=Counters)

    # ---- requests --------------------------------------------------------------------------------------------------

    def admit(self, prompts: list[list[int]], wish: Wish) -> None:
        """Refuses a request that cannot be served, or not now."""
        if not self.worker.healthy:
            raise Bad("the engine has stopped", None, 503)
        answers = len(prompts) * wish.samples
        if answers > self.limits.max_answers:
            raise Bad(f"{answers} answers are asked for, the limit is {self.limits.max_answers}", "n")
        for prompt in prompts:
            try:
                self.worker.check(prompt, wish)
            except Refused as error:
                raise protocol.refused(error) from error
        room = self.limits.max_waiting + self.engine.config.rows
        if self.worker.pending + answers > room:
            raise Bad(f"{self.worker.pending} answers are under way, the limit is {room}; try again soon", None, 429)

    async def pieces(self, prompts: list[list[int]], wish: Wish) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, what is new of it) until every choice has ended; leaving early gives the request up."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

        def hearer(first: int) -> Callable[[Piece], None]:
            def hear(piece: Piece) -> None:
                loop.call_soon_threadsafe(inbox.put_nowait, (first + piece.answer, piece))

            return hear

        numbers = [self.worker.submit(prompt, wish, i, hearer(i * wish.samples)) for i, prompt in enumerate(prompts)]
        left = len(prompts) * wish.samples
        try:
            while left:
                index, piece = await inbox.get()
                left -= bool(piece.reason)
                yield index, piece
        finally:
            if left:
                self.counters.add("cancelled")
                for number in numbers:
                    self.worker.cancel(number)

    async def whole(self, request: Any, prompts: list[list[int]], wish: Wish) -> list[Answer]:
        """All answers of a request whose client waits for them; the `wish.n` best of each prompt."""
        answers = [Answer() for _ in range(len(prompts) * wish.samples)]

        async def collect() -> None:
            async for index, piece in self.pieces(prompts, wish):
                answers[index].add(piece)

        await _unless_gone(request, collect())
        if any(a.reason == "error" for a in answers):
            if not self.worker.healthy:
                raise Bad("the engine has stopped", None, 503)
            raise Bad("the model gave logits that are not finite numbers", None, 500)
        if any(a.reason == "cancelled" for a in answers):
            raise Bad("the server is shutting down", None, 503)
        self.counters.add("answered")
        groups = [answers[i : i + wish.samples] for i in range(0, len(answers), wish.samples)]
        if wish.samples > wish.n:
            groups = [sorted(g, key=lambda a: -sum(a.logprobs) / max(1, len(a.logprobs)))[: wish.n] for g in groups]
        return [a for group in groups for a in group]

    async def stream(self, form: Form, prompts: list[list[int]], wish: Wish, count: bool) -> AsyncIterator[bytes]:
        """Server-sent events of a reply."""
        answers = [Answer() for _ in range(len(prompts) * wish.samples)]
        head = form.head(stream=True)
        async for index, piece in self.pieces(prompts, wish):
            first = not answers[index].tokens and not answers[index].text
            new = Answer()
            new.add(piece)
            answers[index].add(piece)
            if piece.reason in ("error", "cancelled"):
                yield event(Bad(f"this answer ended early: {piece.reason}", None, 500).body())
            elif piece.text or piece.reason or form.logprobs:
                yield event({**head, "choices": [form.choice(index, new, True, first)]})
        if count:
            yield event({**head, "choices": [], "usage": usage(prompts, answers)})
        self.counters.add("answered")
        yield b"data: [DONE]\n\n"

    # ---- bodies ----------------------------------------------------------------------------------------------------

    def ids(self, text: str) -> list[int]:
        """The tokens of a text that a request brought."""
        try:
            return self.tokenizer.encode(text)
        except Refused as error:
            raise protocol.refused(error) from error

    def encoded(self, prompt: Any) -> list[list[int]]:
        """The prompts of a completion: texts, or tokens."""
        one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int))
        found = []
        for p in [prompt] if one else prompt:
            if isinstance(p, str):
                found.append(self.prefix + self.ids(p) or [self.tokenizer.eod])
            elif isinstance(p, list) and p and all(isinstance(t, int) and not isinstance(t, bool) for t in p):
                found.append(p)
            else:
                raise Bad("prompt must be a text, a list of texts, or tokens", "prompt")
        if not found:
            raise Bad("prompt is empty", "prompt")
        return found

    def known_model(self, body: dict[str, Any]) -> None:
        """Refuses another model's name."""
        if body.get("model", self.name) != self.name:
            raise Bad(f"there is no model {body['model']}; this server has {self.name}", "model", 404)


async def _unless_gone(request: Any, work: Any) -> None:
    """Runs `work`, and ends it when the client has gone."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait([task], timeout=0.25)
        if not task.done() and await request.is_disconnected():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise Bad("the client has gone", None, GONE)
    await task


def build(server: Server) -> Any:
    """The FastAPI application."""
    library = need_library("fastapi", "isotron serve")
    replies = need_library("fastapi.responses", "isotron serve")
    app = library.FastAPI(title="isotron", docs_url=None, redoc_url=None, openapi_url=None)
    routes = _Routes(server, replies)
    for path, methods, route in (
        ("/v1/completions", ["POST"], routes.completions),
        ("/v1/chat/completions", ["POST"], routes.chat),
        ("/v1/models", ["GET"], routes.models),
        ("/api", ["PUT"], routes.megatron),
    ):
        app.add_api_route(path, _guarded(server, replies, route, library), methods=methods)
    for path, show in (("/health", routes.health), ("/metrics", routes.metrics), ("/", routes.page)):
        app.add_api_route(path, _plain(show), methods=["GET"])
    return app


def _plain(route: Callable[[], Any]) -> Callable[..., Awaitable[Any]]:
    async def handle() -> Any:
        return route()

    handle.__annotations__ = {}
    return handle


def _guarded(server: Server, replies: Any, route: Callable[..., Awaitable[Any]], library: Any) -> Any:
    """The route behind the API key, with every `Bad` as its answer."""

    async def handle(request: Any) -> Any:
        try:
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            if server.api_key and not hmac.compare_digest(key.encode(), server.api_key.encode()):
                raise Bad("a valid API key is needed: Authorization: Bearer KEY", None, 401)
            raw = await _body(request, server.limits.max_body)
            if raw is None:
                server.counters.add("cancelled")
                return replies.Response(status_code=GONE)
            return await route(request, raw)
        except Bad as bad:
            if bad.status != GONE:  # counted where its rows were given up
                server.counters.add("refused" if bad.status < GONE else "failed")
            headers = {"Retry-After": "1"} if bad.status == 429 else {}
            return replies.JSONResponse(bad.body(), bad.status, headers=headers)

    handle.__annotations__ = {"request": library.Request}
    return handle


async def _body(request: Any, most: int) -> bytes | None:
    """The body, read no further than the limit; None where the client left before its end."""
    found = b""
    try:
        async for part in request.stream():
            found += part
            if len(found) > most:
                raise Bad(f"the body has more than {most} bytes", None, 413)
    except need_library("starlette.requests", "isotron serve").ClientDisconnect:
        return None
    return found


class _Routes:
    """One method per route."""

    def __init__(self, server: Server, replies: Any) -> None:
        self.server, self.replies = server, replies

    async def completions(self, request: Any, raw: bytes) -> Any:
        """POST /v1/completions."""
        server, body = self.server, protocol.read(raw, protocol.COMPLETION)
        server.known_model(body)
        if "prompt" not in body:
            raise Bad("prompt is missing", "prompt")
        prompts = server.encoded(body["prompt"])
        wish = protocol.wish_of(body, body.get("logprobs", 0), server.given)
        form = Form(server.name, False, "logprobs" in body, server.tokenizer)
        return await self._reply(request, body, form, prompts, wish)

    async def chat(self, request: Any, raw: bytes) -> Any:
        """POST /v1/chat/completions."""
        server, body = self.server, protocol.read(raw, protocol.CHAT)
        server.known_model(body)
        if "messages" not in body:
            raise Bad("messages is missing", "messages")
        try:
            text = server.template.text(body["messages"])
        except ValueError as error:
            raise Bad(str(error), "messages") from error
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise Bad("top_logprobs needs logprobs: true", "top_logprobs")
        prompts = [server.ids(text) or [server.tokenizer.eod]]
        wish = protocol.wish_of(body, body.get("top_logprobs", 0), server.given)
        form = Form(server.name, True, bool(body.get("logprobs")), server.tokenizer)
        return await self._reply(request, body, form, prompts, wish)

    async def _reply(self, request: Any, body: dict[str, Any], form: Form, prompts: Any, wish: Wish) -> Any:
        server = self.server
        if body.get("stream") and wish.samples > wish.n:
            raise Bad("a stream cannot choose among best_of answers", "best_of")
        server.admit(prompts, wish)
        if body.get("stream"):
            count = bool(body.get("stream_options", {}).get("include_usage"))
            events = server.stream(form, prompts, wish, count)
            return self.replies.StreamingResponse(events, media_type="text/event-stream")
        answers = await server.whole(request, prompts, wish)
        choices = [form.choice(i, answer, False) for i, answer in enumerate(answers)]
        whole = {**form.head(False), "choices": choices, "usage": usage(prompts, answers)}
        return self.replies.JSONResponse(whole)

    async def megatron(self, request: Any, raw: bytes) -> Any:
        """PUT /api, as Megatron-LM's text generation server takes it."""
        server, body = self.server, protocol.read(raw, protocol.MEGATRON)
        if "prompts" not in body:
            raise Bad("prompts is missing", "prompts")
        begin = [server.tokenizer.bos or server.tokenizer.eod] if body.get("add_BOS") else []
        prompts = [begin + p for p in server.encoded(body["prompts"])]
        wish = protocol.megatron_wish(body, server.given)
        server.admit(prompts, wish)
        answers = await server.whole(request, prompts, wish)
        tokens = [p + a.tokens for p, a in zip(prompts, answers, strict=True)]
        found: dict[str, Any] = {
            "text": [p + a.text for p, a in zip(body["prompts"], answers, strict=True)],
            "segments": [[server.tokenizer.decode([t]) for t in row] for row in tokens],
        }
        if body.get("logprobs"):
            found["logprobs"] = [a.logprobs for a in answers]
        return self.replies.JSONResponse(found)

    async def models(self, request: Any, raw: bytes) -> Any:
        """GET /v1/models."""
        one = {"id": self.server.name, "object": "model", "created": self.server.counters.begun, "owned_by": "isotron"}
        return self.replies.JSONResponse({"object": "list", "data": [one]})

    def health(self) -> Any:
        """GET /health."""
        fine = self.server.worker.healthy
        state = {"status": "ok"} if fine else {"status": "failed", "reason": self.server.worker.failure}
        return self.replies.JSONResponse(state, 200 if fine else 503)

    def metrics(self) -> Any:
        """GET /metrics."""
        return self.replies.PlainTextResponse(render(self.server.counters, self.server.worker))

    def page(self) -> Any:
        """GET /."""
        return self.replies.HTMLResponse(PAGE.replace("MODEL", json.dumps(self.server.name)))
