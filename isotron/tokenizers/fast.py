"""A faster library that gives the same ids, used only where that is known. PURE.

`gigatoken` (optional: pip install gigatoken) splits and merges GPT-2-like byte-level BPE many times faster than
`tokenizers`. Whether it gives the same ids depends on the pattern that splits text into words: for the one of GPT-2 a
test compares every code point of Unicode and random text; no other pattern is handed to it. At start both libraries
encode a page of awkward text, and a difference leaves the work to `tokenizers`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.integer]
EncodeOne: TypeAlias = Callable[[str], Ids]

KNOWN_GOOD = ((0, 10),)  # (major, minor) of gigatoken that the tests were run with
RENEW = 1 << 27  # characters after which the library is loaded anew: it remembers every word that it has met
_RANGES = (range(0x20, 0x250), range(0x370, 0x400), range(0x600, 0x680), range(0x900, 0x980), range(0x1F600, 0x1F620))
_PAGE = (
    "It's I'LL we've  two   three\n\n\nlines\r\n\ttab \u00a0\u2003wide 12345 1,000.50 a1b2 x_y <|endoftext|>!?...",
    "na\u00efve caf\u00e9 e\u0301 \u6771\u4eac \ud55c\uad6d\uc5b4 \U0001f468\u200d\U0001f467 \u0e01\u0e33",
    "\u2028\u2029\x1c\x85\x00\x7f \ufeff\u200b\u3000 \u00bd\u00b2\u2167\u0661\u0967 trailing   ",
    *("".join(f"x{chr(c)}y 1{chr(c)} {chr(c)}!" for c in codes) for codes in _RANGES),
)


class FastBPE:
    """One text at a time to its ids, as an array; memory stays bounded over any amount of text."""

    def __init__(self, library: Any, tokenizer_json: str) -> None:
        self._library, self._json, self._seen = library, tokenizer_json, 0
        self._encode: EncodeOne = self._load()

    def _load(self) -> EncodeOne:
        encode: EncodeOne = self._library.Tokenizer.from_json(self._json).backend.encode
        return encode

    def __call__(self, text: str) -> Ids:
        """The ids of one text."""
        self._seen += len(text)
        if self._seen > RENEW:
            self._encode, self._seen = self._load(), len(text)
        return self._encode(text)


def fast_bpe(tokenizer_json: str, reference: Callable[[str], list[int]]) -> FastBPE | None:
    """The fast encoder of a `tokenizer.json` (its text), or None where `reference` has to do the work."""
    if not is_plain_byte_level(tokenizer_json):
        return None
    try:
        version = importlib.metadata.version("gigatoken")
        library = importlib.import_module("gigatoken")
    except ImportError:  # PackageNotFoundError is one
        return None
    if tuple(int(n) for n in version.split(".")[:2] if n.isdecimal()) not in KNOWN_GOOD:
        return None
    try:
        fast = FastBPE(library, tokenizer_json)
        same = all(fast(text).tolist() == reference(text) for text in _PAGE)
    except ValueError:  # a construction that the library does not know
        return None
    return fast if same else None


def is_plain_byte_level(tokenizer_json: str) -> bool:
    """Whether it is BPE over bytes, split by GPT-2's pattern, with nothing before, between or after."""
    values = json.loads(tokenizer_json)
    model, split = values.get("model") or {}, values.get("pre_tokenizer") or {}
    plain_model = model.get("type") == "BPE" and not any(
        model.get(name)
        for name in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "end_of_word_suffix")
        + ("continuing_subword_prefix",)
    )
    plain_split = (
        split.get("type") == "ByteLevel" and not split.get("add_prefix_space") and split.get("use_regex", True)
    )
    tokens = values.get("added_tokens") or []
    odd = any(t.get(name) for t in tokens for name in ("single_word", "lstrip", "rstrip"))
    return plain_model and plain_split and not values.get("normalizer") and not odd
