"""The engine of a server: requests in from any thread, text out, one pass after the other.

Rank 0 decides what happens before each pass (requests that came, requests that were given up, the end) and tells the
other ranks; every rank then does the same to the same rows. Nobody else touches the engine.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from isotron.core import comm
from isotron.core.errors import Refused
from isotron.inference.config import Ending, Sampling, Wish
from isotron.inference.engine import Engine
from isotron.inference.row import Row

HEARTBEAT = 20.0  # seconds after which waiting ranks hear from rank 0, long before a collective gives up


@dataclass(frozen=True)
class Piece:
    """What is new of one answer: text that no stop can take back, tokens with their log-probabilities, and how it ended
    ("" while it goes on)."""

    answer: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    reason: str = ""


@dataclass
class Job:
    """One prompt of a request on its way through the engine; `hear` is called from the engine's thread."""

    number: int
    prompt: list[int]
    wish: Wish
    request: int
    hear: Callable[[Piece], None]
    rows: list[Row] = field(default_factory=list)
    sent: list[tuple[int, int]] = field(default_factory=list)  # characters and tokens of each row


class Followers:
    """The rows of all requests on one rank, moved by the commands of rank 0."""

    def __init__(self, engine: Engine, first: bool) -> None:
        self.engine, self.first = engine, first
        self.rows: dict[int, list[Row]] = {}

    def obey(self, command: dict[str, Any]) -> None:
        """Add and cancel what the command says."""
        for new in command["add"]:
            wish = wish_from(new["wish"])
            self.rows[new["number"]] = self.engine.add(new["prompt"], wish, new["request"], watch_text=self.first)
        for number in command["cancel"]:
            for row in self.rows.pop(number, []):
                self.engine.cancel(row)

    def step(self) -> None:
        """One pass, where there is anything to do."""
        if not self.engine.idle:
            self.engine.step()
        for number in [n for n, rows in self.rows.items() if all(r.reason for r in rows)]:
            del self.rows[number]


def wish_from(values: dict[str, Any]) -> Wish:
    """A wish as it came through JSON."""
    choice, ending = values["sampling"], values["ending"]
    bias = tuple((int(t), float(b)) for t, b in choice["logit_bias"])
    sampling = Sampling(**{**choice, "logit_bias": bias})
    end = Ending(ending["max_new_tokens"], frozenset(ending["stop_ids"]), tuple(ending["stop"]))
    grammar = None if values["grammar"] is None else tuple(values["grammar"])
    return Wish(**{**values, "sampling": sampling, "ending": end, "grammar": grammar})


def wish_to(wish: Wish) -> dict[str, Any]:
    """A wish for JSON."""
    values = asdict(wish)
    values["ending"]["stop_ids"] = sorted(wish.ending.stop_ids)
    return values


def follow(engine: Engine, cache_tokens: int) -> None:
    """What every rank but the first does until rank 0 ends."""
    with engine.opened(cache_tokens):
        mine = Followers(engine, first=False)
        while True:
            command = comm.broadcast_json(None, engine.runner.world)
            if command["end"]:
                return
            mine.obey(command)
            mine.step()


class Worker:
    """The thread of rank 0 that runs the engine."""

    def __init__(self, engine: Engine, cache_tokens: int) -> None:
        self.engine, self.cache_tokens = engine, cache_tokens
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._number = 0
        self._lock = threading.Lock()
        self.pending = 0  # answers that were handed in and have not ended
        self.failure = ""
        self.on_failure: Callable[[], None] = lambda: None
        self.generated = self.prompted = 0
        self._opened = threading.Event()

    def start(self) -> None:
        """Begin; returns when requests can be taken."""
        self._thread.start()
        self._opened.wait()

    def submit(self, prompt: list[int], wish: Wish, request: int, hear: Callable[[Piece], None]) -> int:
        """Hand in a prompt that `check` let through; its number."""
        with self._lock:
            self._number += 1
            number = self._number
            self.pending += wish.samples
        self._inbox.put(("add", Job(number, prompt, wish, request, hear)))
        return number

    def cancel(self, number: int) -> None:
        """Nobody waits for this prompt's answers any more."""
        self._inbox.put(("cancel", number))

    def stop(self) -> None:
        """End all requests and the thread."""
        if self._thread.is_alive():
            self._inbox.put(("end", None))
            self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether requests will be answered."""
        return self._thread.is_alive() and not self.failure

    def _run(self) -> None:
        try:
            with self.engine.opened(self.cache_tokens):
                self._opened.set()
                self._serve()
        except Exception as error:
            traceback.print_exc()
            self.failure = f"{type(error).__name__}: {error}"
            for job in list(self._jobs.values()):
                self._end(job, "error")
            self.on_failure()
        finally:
            self._opened.set()

    def _serve(self) -> None:
        mine = Followers(self.engine, first=True)
        while True:
            command = self._commands(wait=self.engine.idle)
            comm.broadcast_json(command, self.engine.runner.world)
            mine.obey(command)
            for new in command["add"]:
                job = self._jobs[new["number"]]
                job.rows = mine.rows[job.number]
                job.sent = [(0, 0)] * len(job.rows)
            if command["end"]:
                for job in list(self._jobs.values()):
                    self._end(job, "cancelled")
                return
            mine.step()
            for job in list(self._jobs.values()):
                self._speak(job)

    def _commands(self, wait: bool) -> dict[str, Any]:
        """Everything that came since the last pass; when there is nothing else to do, waits for something."""
        command: dict[str, Any] = {"add": [], "cancel": [], "end": False}
        given: set[int] = set()
        timeout = HEARTBEAT
        while True:
            try:
                kind, what = self._inbox.get(block=wait, timeout=timeout if wait else None)
            except queue.Empty:
                break
            wait = False
            if kind == "add":
                self._jobs[what.number] = what
                command["add"].append(
                    {"number": what.number, "prompt": what.prompt, "wish": wish_to(what.wish), "request": what.request}
                )
            elif kind == "cancel":
                given.add(what)
            else:
                command["end"] = True
        for number in given:
            job = self._jobs.pop(number, None)
            if job is not None:
                command["cancel"].append(number)
                self._done(job)
        command["add"] = [new for new in command["add"] if new["number"] not in given]
        return command

    def _speak(self, job: Job) -> None:
        """Tell a request what is new of its answers."""
        for i, row in enumerate(job.rows):
            characters, tokens = job.sent[i]
            if tokens < 0 or row.text is None or (len(row.new) == tokens and not row.reason):
                continue
            safe = len(row.text.whole) if row.reason else row.text.safe
            new = row.tokens[row.prompt + tokens :]
            self.generated += len(new)
            piece = Piece(i, row.text.whole[characters:safe], new, row.logprobs[tokens:], row.tops[tokens:], row.reason)
            job.sent[i] = (safe, -1 if row.reason else tokens + len(new))
            job.hear(piece)
        if all(tokens < 0 for _, tokens in job.sent):
            del self._jobs[job.number]
            self.prompted += len(job.prompt)
            self._done(job)

    def _end(self, job: Job, reason: str) -> None:
        for i in range(job.wish.samples):
            job.hear(Piece(i, "", [], [], [], reason))
        self._jobs.pop(job.number, None)
        self._done(job)

    def _done(self, job: Job) -> None:
        with self._lock:
            self.pending -= job.wish.samples

    def check(self, prompt: list[int], wish: Wish) -> None:
        """Refuses what can never be served, grammars too."""
        self.engine.check(prompt, wish)
        if wish.grammar is not None:
            self.engine.grammar(*wish.grammar)


__all__ = ["Followers", "Job", "Piece", "Refused", "Worker", "follow", "wish_from", "wish_to"]
