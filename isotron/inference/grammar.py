"""Answers that follow a JSON schema or a regular expression, through the library `llguidance` (extra: `structured`).

Every rank follows the grammar, so that all know when it is complete; only the one that chooses asks which tokens are
allowed. Bytes of tokens are found by decoding each after a known one; a token that is no whole text is not allowed,
unless the tokenizer is a Hugging Face file, which the library reads itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isotron.core.errors import Refused, refuse
from isotron.tokenizers.base import Tokenizer, need_library

KINDS = ("json_schema", "json", "regex")


class Grammars:
    """Makes grammars for one tokenizer. `vocab`: columns of the model's logits."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._library = need_library("llguidance", "--json-schema, --json-object or --regex")
        self._vocab = vocab
        own = getattr(tokenizer, "_tokenizer", None)
        if own is not None and hasattr(own, "to_str"):
            self._tokens = self._library.LLTokenizer(own.to_str(), eos_token=tokenizer.eod)
        else:
            self._tokens = self._library.LLTokenizer(self._library.TokenizerWrapper(_Decoded(tokenizer)))

    def make(self, kind: str, text: str) -> Grammar:
        """The grammar of one answer; refuses what the library cannot read."""
        matcher_type = self._library.LLMatcher
        asked = f"--{kind.replace('_', '-')} {' '.join(text.split())[:60]}"
        make: dict[str, Callable[[], str]] = {
            "json_schema": lambda: matcher_type.grammar_from_json_schema(text),
            "json": lambda: matcher_type.grammar_from_json_schema('{"type": "object"}'),
            "regex": lambda: matcher_type.grammar_from_regex(text),
        }
        try:
            source = make[kind]()
        except ValueError as error:
            raise _unreadable(asked, str(error)) from error
        wrong = matcher_type.validate_grammar(source, self._tokens)
        if wrong and not wrong.startswith("WARNING"):
            raise _unreadable(asked, wrong)
        return Grammar(matcher_type(self._tokens, source, log_level=0), self._vocab)


class Grammar:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def allowed(self) -> Tensor:
        """[V]: the tokens that can follow."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        found = torch.zeros(self._vocab, dtype=torch.bool)
        n = min(self._vocab, len(bits))
        found[:n] = torch.from_numpy(bits[:n].astype(bool))
        return found

    def take(self, token: int) -> bool:
        """One more token of the answer; whether nothing can follow it."""
        return not self._matcher.consume_token(token) or self._matcher.is_stopped()


class _Decoded:
    """What the library needs of a tokenizer that it cannot read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id, self.bos_token_id = tokenizer.eod, tokenizer.bos
        self._encode = tokenizer.encode
        anchor = tokenizer.encode("a")
        before = len(tokenizer.decode(anchor))
        texts = [tokenizer.decode([*anchor, i])[before:] for i in range(tokenizer.vocab_size)]
        known = {i for i in (tokenizer.eod, tokenizer.bos, tokenizer.eos, tokenizer.pad) if i is not None}
        broken = {i for i, text in enumerate(texts) if "\N{REPLACEMENT CHARACTER}" in text or not text}
        self.special_token_ids = sorted(known | broken)
        self.tokens = [b"<%d>" % i if i in known | broken else text.encode() for i, text in enumerate(texts)]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _unreadable(asked: str, why: str) -> Refused:
    """The library's reason stands in a line that begins with `error: `, or is all of it."""
    lines = why.strip().splitlines()
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    fix = "--regex '[0-9]+'" if asked.startswith("--regex") else '--json-schema \'{"type": "object"}\''
    return refuse(asked, f"it cannot be read: {reason}", fix)
