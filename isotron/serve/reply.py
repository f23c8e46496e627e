"""Pieces of answers -> the objects of the OpenAI API, whole or as a stream."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from isotron.serve.worker import Piece
from isotron.tokenizers.base import Tokenizer


@dataclass
class Answer:
    """One choice of a reply as it grows."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    reason: str = ""

    def add(self, piece: Piece) -> None:
        """What is new."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.tops += piece.tops
        self.reason = piece.reason


@dataclass(frozen=True)
class Form:
    """How a reply looks: completions or chat, with or without log-probabilities."""

    model: str
    chat: bool
    logprobs: bool
    tokenizer: Tokenizer
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, stream: bool) -> dict[str, Any]:
        """What every object of the reply begins with."""
        kind = ("chat.completion.chunk" if stream else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.number}", "object": kind, "created": self.created, "model": self.model}

    def choice(self, index: int, answer: Answer, stream: bool, first: bool = False) -> dict[str, Any]:
        """One choice, or what is new of it."""
        reason = answer.reason or None
        logprobs = self._logprobs(answer) if self.logprobs else None
        if not self.chat:
            return {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": reason}
        role = {"role": "assistant"} if first or not stream else {}
        name, content = ("delta" if stream else "message"), {**role, "content": answer.text}
        return {"index": index, name: content, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        spell = self._spelled
        if self.chat:
            return {
                "content": [
                    {**_token(spell(t), p), "top_logprobs": [_token(spell(i), q) for i, q in tops]}
                    for t, p, tops in zip(answer.tokens, answer.logprobs, _padded(answer), strict=True)
                ]
            }
        texts = [spell(t) for t in answer.tokens]
        offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
        tops = [{spell(i): q for i, q in t} for t in _padded(answer)]
        return {"tokens": texts, "token_logprobs": answer.logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _spelled(self, token: int) -> str:
        return self.tokenizer.decode([token])


def _padded(answer: Answer) -> list[list[tuple[int, float]]]:
    return answer.tops or [[] for _ in answer.tokens]


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(prompts: list[list[int]], answers: list[Answer]) -> dict[str, int]:
    """Tokens of a request."""
    given, made = sum(map(len, prompts)), sum(len(a.tokens) for a in answers)
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
