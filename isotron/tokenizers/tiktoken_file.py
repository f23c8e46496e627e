"""A `.tiktoken` file of BPE ranks: one `base64-bytes rank` per line. PURE.

The file holds neither the splitting pattern nor the special tokens; both follow from which of the published
vocabularies it is, told by its number of ranks. Text never produces special tokens. The patterns and special ids are
those that the tiktoken package publishes (MIT); a test compares them.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

from isotron.core.errors import refuse
from isotron.tokenizers.base import END_OF_TEXT, FileTokenizer, Flat, joined, need_file, need_library

_FIRST = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@dataclass(frozen=True)
class Known:
    """One published vocabulary: what its file does not say."""

    name: str
    pattern: str
    specials: tuple[tuple[str, int], ...]


_FILL = (("<|fim_prefix|>", 100258), ("<|fim_middle|>", 100259), ("<|fim_suffix|>", 100260))
KNOWN = {
    50256: Known("r50k_base", _FIRST, ((END_OF_TEXT, 50256),)),
    50280: Known("p50k_base", _FIRST, ((END_OF_TEXT, 50256),)),
    100256: Known("cl100k_base", _CL100K, ((END_OF_TEXT, 100257), *_FILL, ("<|endofprompt|>", 100276))),
    199998: Known("o200k_base", _O200K, ((END_OF_TEXT, 199999), ("<|endofprompt|>", 200018))),
}


class TikTokenizer(FileTokenizer):
    """tiktoken's BPE from a local file; `specials` maps the special tokens to their ids."""

    type_name = "TikTokenizer"

    def __init__(self, tokenizer_model: str | Path) -> None:
        path = need_file(tokenizer_model, "--tokenizer-model")
        super().__init__({"tokenizer_model": path})
        library = need_library("tiktoken", "--tokenizer-type TikTokenizer")
        ranks = _read_ranks(path)
        known = KNOWN.get(len(ranks))
        if known is None:
            sizes = ", ".join(f"{k.name} {n}" for n, k in KNOWN.items())
            raise refuse(
                f"--tokenizer-model {path}",
                f"it has {len(ranks)} ranks, which is none of the known vocabularies ({sizes})",
                "one of these files complete, or the tokenizer as a Hugging Face tokenizer.json",
            )
        self.specials = dict(known.specials)
        self._encoding = library.Encoding(
            known.name, pat_str=known.pattern, mergeable_ranks=ranks, special_tokens=self.specials
        )
        self._ids = frozenset(ranks.values()) | frozenset(self.specials.values())
        self.vocab_size = max(self._ids) + 1
        self.eod = self.bos = self.eos = self.specials[END_OF_TEXT]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        return [self._encoding.encode_ordinary(text) for text in texts]

    def encode_flat(self, texts: list[str]) -> Flat:
        """The ids of all texts in a row, and the length of each."""
        return joined([self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts])

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8, and ids that no token has, become U+FFFD."""
        parts = (self._encoding.decode_single_token_bytes(i) if i in self._ids else b"\xff" for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")


def _read_ranks(path: Path) -> dict[bytes, int]:
    """token bytes -> rank, refused with the line that is none."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise refuse(
                f"--tokenizer-model {path}",
                f"line {number} is not `base64-bytes rank`: {error}",
                "a complete .tiktoken file",
            ) from error
    return ranks
