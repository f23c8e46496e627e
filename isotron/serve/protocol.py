"""Bodies of requests -> wishes. What cannot be read or is out of range is answered with the rule.

Names are those of the OpenAI API; beside them top_k, min_p, repetition_penalty, stop_token_ids and ignore_eos.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isotron.core.errors import Refused
from isotron.inference.config import Ending, Sampling, Wish

Check = Callable[[Any], bool]


class Bad(Exception):
    """A request that is answered with a 4xx: `status`, what is wrong, and the field."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.field, self.status = message, field, status

    def body(self) -> dict[str, Any]:
        """In the shape of the OpenAI API."""
        if self.status >= 500:
            return {"error": {"message": self.message, "type": "server_error", "param": self.field, "code": None}}
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        name = kind.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": name, "param": self.field, "code": None}}


def refused(error: Refused) -> Bad:
    """A refusal of the engine, with options spelled as fields."""
    lines = [f"{p.asked}: {p.case}; try {p.fix}" for p in error.problems]
    text = re.sub(r"--([a-z][a-z-]*)", lambda m: m[1].replace("-", "_"), " | ".join(lines))
    return Bad(text.replace("max_new_tokens", "max_tokens"))


def _number(value: Any) -> bool:
    """A number that a float can hold: JSON's whole numbers know no largest one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) > sys.float_info.max


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))


def _streams(value: Any) -> bool:
    return isinstance(value, dict) and all(k == "include_usage" and isinstance(v, bool) for k, v in value.items())


# field -> (what it must be, check)
COMMON: dict[str, tuple[str, Check]] = {
    "model": ("a text", lambda v: isinstance(v, str)),
    "max_tokens": ("a whole number", _whole),
    "temperature": ("a number", _number),
    "top_p": ("a number", _number),
    "top_k": ("a whole number", _whole),
    "min_p": ("a number", _number),
    "repetition_penalty": ("a number", _number),
    "presence_penalty": ("a number", _number),
    "frequency_penalty": ("a number", _number),
    "logit_bias": ("an object of token: bias", lambda v: isinstance(v, dict) and all(map(_number, v.values()))),
    "n": ("a whole number", _whole),
    "stop": ("a text or a list of texts", _texts),
    "stop_token_ids": ("a list of whole numbers", lambda v: isinstance(v, list) and all(map(_whole, v))),
    "ignore_eos": ("true or false", lambda v: isinstance(v, bool)),
    "seed": ("a whole number", _whole),
    "stream": ("true or false", lambda v: isinstance(v, bool)),
    "stream_options": ("an object with include_usage, true or false", _streams),
    "response_format": ("an object", lambda v: isinstance(v, dict)),
    "user": ("a text", lambda v: isinstance(v, str)),
}
COMPLETION = {
    **COMMON,
    "prompt": ("a text, a list of texts, or tokens", lambda v: isinstance(v, (str, list))),
    "logprobs": ("a whole number", _whole),
    "best_of": ("a whole number", _whole),
    "echo": ("false: prompts are not repeated", lambda v: v is False),
    "suffix": ("absent: nothing is inserted", lambda v: False),
}
CHAT = {
    **COMMON,
    "messages": ("a list of messages", lambda v: isinstance(v, list) and bool(v) and all(map(_is_message, v))),
    "max_completion_tokens": ("a whole number", _whole),
    "logprobs": ("true or false", lambda v: isinstance(v, bool)),
    "top_logprobs": ("a whole number from 0 to 20", lambda v: _whole(v) and 0 <= v <= 20),
}


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    parts = content if isinstance(content, list) else []
    return isinstance(content, str) or (
        bool(parts) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts)
    )


def read(raw: bytes, fields: Mapping[str, tuple[str, Check]]) -> dict[str, Any]:
    """The fields of a body; null means that a field is not given."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Bad(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Bad("the body must be a JSON object")
    found = {name: value for name, value in body.items() if value is not None}
    for name, value in found.items():
        if name not in fields:
            raise Bad(f"{name} is not a field of this request; it has {', '.join(sorted(fields))}", name)
        what, fine = fields[name]
        if not fine(value):
            raise Bad(f"{name} must be {what}", name)
    return found


@dataclass(frozen=True)
class Defaults:
    """What a server adds to a body: the tokens that end a document, and how long answers are by default."""

    ends: frozenset[int]
    max_tokens: int


def wish_of(body: Mapping[str, Any], tops: int, given: Defaults) -> Wish:
    """The wish of a completion or chat body."""
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    seed = body.get("seed", None)
    sampling = Sampling(
        temperature=body.get("temperature", 1.0),
        seed=random.SystemRandom().getrandbits(48) if seed is None else seed,
        logit_bias=_bias(body.get("logit_bias", {})),
        **{name: body[name] for name in names if name in body},
    )
    stop = body.get("stop", ())
    ends = frozenset() if body.get("ignore_eos") else given.ends
    length = body.get("max_completion_tokens", body.get("max_tokens", given.max_tokens))
    ending = Ending(
        length, ends | frozenset(body.get("stop_token_ids", ())), (stop,) if isinstance(stop, str) else tuple(stop)
    )
    n = body.get("n", 1)
    return Wish(sampling, ending, n, body.get("best_of", 0), True, tops, _grammar(body.get("response_format")))


def _bias(values: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), float(bias)) for token, bias in values.items())
    except ValueError as error:
        raise Bad("logit_bias must be an object of token: bias", "logit_bias") from error


def _grammar(form: Mapping[str, Any] | None) -> tuple[str, str] | None:
    kind = (form or {}).get("type", "text")
    if kind == "text" or form is None:
        return None
    if kind == "json_object":
        return ("json", "{}")
    if kind == "regex" and isinstance(form.get("regex"), str):
        return ("regex", form["regex"])
    schema = form.get("json_schema", {})
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return ("json_schema", json.dumps(schema["schema"]))
    raise Bad("response_format must be text, json_object, regex or json_schema with its schema", "response_format")


# ---- Megatron's text generation server -----------------------------------------------------------------------------

MEGATRON: dict[str, tuple[str, Check]] = {
    "prompts": ("a list of texts", lambda v: isinstance(v, list) and bool(v) and all(isinstance(p, str) for p in v)),
    "tokens_to_generate": ("a whole number of 1 or more", lambda v: _whole(v) and v >= 1),
    "temperature": ("a number above 0, at most 100", lambda v: _number(v) and 0 < v <= 100),
    "top_k": ("a whole number from 0 to 1000", lambda v: _whole(v) and 0 <= v <= 1000),
    "top_p": ("a number from 0 to 1", lambda v: _number(v) and 0 <= v <= 1),
    "logprobs": ("true or false", lambda v: isinstance(v, bool)),
    "add_BOS": ("true or false", lambda v: isinstance(v, bool)),
    "stop_token": ("a token", _whole),
    "random_seed": ("a whole number of 0 or more", lambda v: _whole(v) and v >= 0),
    "no_log": ("true or false", lambda v: isinstance(v, bool)),
}


def megatron_wish(body: Mapping[str, Any], given: Defaults) -> Wish:
    """The wish of a body of `PUT /api`; there top_k = 1 means greedy."""
    greedy = body.get("top_k", 0) == 1
    sampling = Sampling(
        0.0 if greedy else body.get("temperature", 1.0),
        0 if greedy else body.get("top_k", 0),
        body.get("top_p", 0.0),
        body.get("random_seed", random.SystemRandom().getrandbits(48)),
    )
    ends = frozenset({body["stop_token"]}) if "stop_token" in body else given.ends
    return Wish(sampling, Ending(body.get("tokens_to_generate", 64), ends))
