"""Conversations as ids by a tokenizer's chat template, and which of the ids are answers. PURE.

A template is a Jinja text, `chat_template` in tokenizer_config.json or the file chat_template.jinja; it is rendered in
a sandbox. The text is cut where an answer begins and ends, and every piece is encoded by itself: so a prompt has the
same ids in training as when an answer to it is generated. Ids of answers, with the tokens that end them, carry loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isotron.core.errors import refuse
from isotron.tokenizers.base import Tokenizer, need_library, unreadable

FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """ids of a conversation, and True for those that are (part of) an answer."""

    ids: npt.NDArray[np.int64]
    answers: npt.NDArray[np.bool_]


class ChatTemplate:
    """One template, ready to render; `tokens` are the special tokens that it may name (bos_token, eos_token)."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        library = need_library("jinja2", f"the chat template of {where}")
        sandbox = need_library("jinja2.sandbox", f"the chat template of {where}")
        self.source, self.where, self._tokens = source, where, dict(tokens)
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self._error = library.TemplateError
        try:
            self._template = environment.from_string(source)
        except library.TemplateError as error:
            raise refuse(f"the chat template of {where}", f"it is no Jinja template: {error}", "another one") from error

    def render(self, messages: Sequence[Message], answer_next: bool = False) -> str:
        """The text of a conversation; with `answer_next` up to where the next answer begins."""
        try:
            return str(
                self._template.render(messages=list(messages), add_generation_prompt=answer_next, **self._tokens)
            )
        except (self._error, TypeError, ValueError) as error:
            raise refuse(
                f"the chat template of {self.where}",
                f"it does not take a conversation of the roles {[m.get('role') for m in messages]}: {error}",
                "conversations in the order that the model was made for",
                exit_code=1,
            ) from error

    def encode(self, messages: Sequence[Message], tokenizer: Tokenizer) -> Conversation:
        """The ids of a conversation and which of them are answers (role `assistant`)."""
        pieces: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:number], answer_next=True)
            after = self.render(messages[: number + 1])
            if not (before.startswith(done) and after.startswith(before)):
                raise refuse(
                    f"the chat template of {self.where}",
                    f"answer {number} does not follow what is shown before it, so its ids cannot be told apart",
                    "a template that renders the beginning of a conversation as the beginning of its text",
                    exit_code=1,
                )
            pieces += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        whole = self.render(messages)
        pieces.append((whole[len(done) :] if whole.startswith(done) else "", False))
        pieces = [(text, answer) for text, answer in pieces if text]
        flat, lengths = tokenizer.encode_flat([text for text, _ in pieces])
        return Conversation(
            flat.astype(np.int64), np.repeat([answer for _, answer in pieces], lengths).astype(np.bool_)
        )


def _raise(message: str) -> None:
    raise ValueError(message)


def read_template(directory: str | Path) -> ChatTemplate | None:
    """The chat template of a directory; None where it has none. Of several the one named `default`."""
    folder = Path(directory)
    config: Any = {}
    if (folder / CONFIG).is_file():
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except ValueError as error:
            raise unreadable("--tokenizer-model", folder / CONFIG, error, "JSON file") from error
    source = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if (folder / FILE).is_file():
        source = (folder / FILE).read_text(encoding="utf-8")
    if not isinstance(source, str) or not source.strip():
        return None
    tokens = {}
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        tokens[role] = token if isinstance(token, str) else ""
    return ChatTemplate(source, tokens, str(folder))
