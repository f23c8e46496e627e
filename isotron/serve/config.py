"""What a server allows. PURE."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """max_waiting: answers that may wait for room before requests are turned away (429). max_answers: of one request.
    max_body: bytes of a request. grace: seconds that running requests are given when the server is told to stop."""

    max_waiting: int = 256
    max_answers: int = 128
    max_body: int = 1 << 20
    grace: int = 30
