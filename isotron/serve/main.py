"""One rank of `isotron serve`: rank 0 answers HTTP, the others follow its engine."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotron.config.schema import RunConfig
from isotron.core.checkpoint.group import GroupRanks
from isotron.core.checkpoint.locate import STEP
from isotron.core.checkpoint.ranks import together
from isotron.core.device import total_memory
from isotron.core.errors import refuse
from isotron.core.host import available_memory
from isotron.core.mesh import AXES
from isotron.hub.folder import end_tokens
from isotron.hub.foreign import is_foreign
from isotron.hub.opened import ORIGIN
from isotron.inference.engine import Engine
from isotron.inference.generate import DEFAULTS, engine_config, open_engine
from isotron.inference.session import session
from isotron.serve.app import Server, build
from isotron.serve.chat import find_template
from isotron.serve.config import Limits
from isotron.serve.listen import bind
from isotron.serve.protocol import Defaults
from isotron.serve.worker import Worker, follow
from isotron.tokenizers.base import need_library

CACHE_BYTES = 2 << 30  # of a rank, unless --cache-tokens says otherwise


def main(config: RunConfig, options: Mapping[str, Any]) -> int:
    """Serve until told to stop; returns the exit code."""
    options = {**DEFAULTS, **options}
    with session(config) as rank:
        ranks, place = GroupRanks(rank.mesh.group(*AXES)), (options["host"], options["port"])
        sockets, _ = together(ranks, f"listen at {place}", lambda: bind(*place) if rank.speaks else [])
        how = engine_config(options)
        engine = open_engine(rank.config, rank.step, rank.mesh, rank.device, how, options["draft"])
        tokens = options["cache_tokens"] or default_cache(engine)
        together(ranks, "a cache", lambda: check_cache(engine, tokens))
        if rank.speaks:
            return serve(engine, rank.step, tokens, options, sockets)
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 says when it is over
            signal.signal(number, signal.SIG_IGN)
        follow(engine, tokens)
        return 0


def default_cache(engine: Engine) -> int:
    """Tokens for as many of the longest sequences as may be at work, within CACHE_BYTES."""
    longest = engine.model.config.max_position_embeddings + engine.config.page
    return int(min(engine.config.rows * longest, max(longest, CACHE_BYTES // bytes_per_token(engine))))


def bytes_per_token(engine: Engine) -> int:
    """Bytes of cache that a token takes on a rank."""
    cfg, model = engine.model.config, engine.model
    width = 2 * getattr(cfg, "kv_heads", cfg.num_attention_heads) * cfg.head_size
    layers = -(-cfg.num_layers // model.layout.pp)
    return max(1, int(width * layers * model.dtype.itemsize // min(model.layout.tp, 8)))


def check_cache(engine: Engine, tokens: int) -> None:
    """Refuses a cache that is larger than the memory of the device."""
    device = engine.model.device
    free = available_memory() if device.type == "cpu" else total_memory(device)
    each = bytes_per_token(engine)
    if free is not None and tokens * each > free:
        case = f"a token takes {each:,} bytes, and {free / 2**30:.1f} GiB of memory are free"
        raise refuse(f"--cache-tokens {tokens}", case, f"--cache-tokens {max(1, int(free / each / 2))}")


def make_server(engine: Engine, step: Path, cache_tokens: int, options: Mapping[str, Any]) -> Server:
    """Everything that the routes need; its worker has not been started."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise refuse("isotron serve without a tokenizer", "requests are texts", "--tokenizer-model FILE")
    origin = step if is_foreign(step) else step / ORIGIN
    files = getattr(tokenizer, "files", {})
    places = [*(Path(f).parent for f in files.values()), origin, step / "tokenizer"]
    limits = Limits(options["max_waiting"], options["max_answers"], options["max_body_bytes"], options["grace"])
    return Server(
        Worker(engine, cache_tokens),
        engine,
        tokenizer,
        find_template(options["chat_template"], places),
        options["served_name"] or _name_of(step.resolve()),
        limits,
        Defaults(engine.ends(end_tokens(origin)), options["max_new_tokens"]),
        list(tokenizer.prefix) if origin.is_dir() else [],
        options["api_key"],
    )


def _name_of(step: Path) -> str:
    """What clients call the model: the run of a step, or the directory of any other model."""
    return step.parent.name if STEP.fullmatch(step.name) else step.name


def serve(
    engine: Engine, step: Path, cache_tokens: int, options: Mapping[str, Any], sockets: list[socket.socket]
) -> int:
    """Rank 0: HTTP in this thread, the engine in another; 1 when the engine failed."""
    library = need_library("uvicorn", "isotron serve")
    server = make_server(engine, step, cache_tokens, options)
    app = build(server)
    config = library.Config(
        app, log_level="warning", timeout_graceful_shutdown=server.limits.grace, limit_concurrency=None,
        timeout_keep_alive=5,
    )  # fmt: skip
    http = library.Server(config)

    def give_up() -> None:
        http.should_exit = True

    server.worker.on_failure = give_up
    server.worker.start()
    try:
        if server.worker.healthy:
            host = f"[{options['host']}]" if ":" in options["host"] else options["host"]
            asyncio.run(_run(http, sockets, f"http://{host}", server.name, options["json"]))
    finally:
        server.worker.stop()
    return 1 if server.worker.failure else 0


async def _run(http: Any, sockets: list[socket.socket], where: str, name: str, as_json: bool) -> None:
    """Serves, and says the address once it can be reached."""
    url = f"{where}:{sockets[0].getsockname()[1]}"
    task = asyncio.ensure_future(http.serve(sockets))
    while not http.started and not task.done():
        await asyncio.sleep(0.02)
    if http.started:
        if as_json:
            print(json.dumps({"model": name, "url": url}), flush=True)
        print(f"serving {name} at {url}", file=sys.stderr, flush=True)
    await task
