"""A Hugging Face `tokenizer.json`, with the special tokens that the files beside it name. PURE.

Which token ends a document: `eos_token` of `tokenizer_config.json` or `special_tokens_map.json`, else
`eos_token_id` of `generation_config.json`, else the first name of KNOWN_ENDS among the added tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from isotron.core.errors import refuse
from isotron.tokenizers.base import (
    END_OF_TEXT,
    FileTokenizer,
    Flat,
    ids_by,
    joined,
    need_file,
    need_library,
    unreadable,
)
from isotron.tokenizers.fast import FastBPE, fast_bpe

KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<eos>", "[EOS]", "[SEP]")
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


class HuggingFaceTokenizer(FileTokenizer):
    """Any fast tokenizer of the Hugging Face format; text that spells a special token becomes that token."""

    type_name = "HuggingFaceTokenizer"

    def __init__(self, tokenizer_model: str | Path) -> None:
        given = Path(tokenizer_model).expanduser()
        path = need_file(given / "tokenizer.json" if given.is_dir() else given, "--tokenizer-model")
        extras = tuple(path.parent / name for name in BESIDE if (path.parent / name).is_file())
        super().__init__({"tokenizer_model": path}, extras)
        library = need_library("tokenizers", "--tokenizer-type HuggingFaceTokenizer")
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for what it cannot parse
            raise unreadable("--tokenizer-model", path, error, "tokenizer.json") from error
        self._tokenizer.no_truncation()  # some files cut at 512 tokens: right for inference, wrong for a corpus
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        named = _special_tokens(extras)
        roles = {role: self._id_of(named.get(role)) for role in ROLES}
        self.bos, self.eos, self.pad, self.unk = (roles[role] for role in ROLES[:4])
        self.sep, self.cls, self.mask = (roles[role] for role in ROLES[4:])
        self.extra_ids = extra_ids(self._tokenizer.token_to_id)
        if self.eos is None:
            self.eos = next((i for i in map(self._id_of, KNOWN_ENDS) if i is not None), None)
        if self.eos is None:
            raise refuse(
                f"--tokenizer-model {path}",
                "neither it nor a tokenizer_config.json beside it names an end-of-sequence token",
                'a tokenizer_config.json beside it with "eos_token": "TOKEN", a token of this vocabulary',
            )
        self.eod = self.eos
        plain, full = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        self.prefix = tuple(full[: len(full) - len(plain)]) if full[-len(plain) :] == plain else ()
        added = {t.content for t in self._tokenizer.get_added_tokens_decoder().values()}
        self.notes = collisions({r: str(named[r]) for r in ROLES if isinstance(named.get(r), str)}, roles, added)

    def _id_of(self, token: str | int | None) -> int | None:
        return self._tokenizer.token_to_id(token) if isinstance(token, str) else token

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without the special tokens a post-processor would add."""
        return ids_by(self._tokenizer, texts)

    @cached_property
    def _fast(self) -> FastBPE | None:
        return fast_bpe(self._tokenizer.to_str(), self.encode)

    def encode_flat(self, texts: list[str]) -> Flat:
        """The ids of all texts in a row, and the length of each, by the fastest library that is known to be exact."""
        return super().encode_flat(texts) if self._fast is None else joined([self._fast(text) for text in texts])

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def extra_ids(id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    """The ids of <extra_id_0>, <extra_id_1>, .. as far as the tokenizer has them."""
    found = takewhile(lambda i: i is not None, (id_of(f"<extra_id_{n}>") for n in count()))
    return tuple(i for i in found if i is not None)


def collisions(names: dict[str, str], ids: dict[str, int | None], added: set[str]) -> tuple[str, ...]:
    """What a user should know: a role whose token is an ordinary one, or that the tokenizer does not have."""
    lines = []
    for role, name in names.items():
        if ids[role] is None:
            lines.append(f"tokenizer: {role} is {name!r}, which the vocabulary does not have: there is no {role}")
        elif name not in added:
            lines.append(f"tokenizer: {role} is {name!r}, id {ids[role]}: an ordinary token, which text produces too")
    return tuple(lines)


def _special_tokens(paths: tuple[Path, ...]) -> dict[str, str | int]:
    """role -> token or id, the first of `paths` that names a role decides."""
    found: dict[str, str | int] = {}
    for path in paths:
        if path.suffix != ".json":
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise unreadable("--tokenizer-model", path, error, "JSON file beside tokenizer.json") from error
        for role in ROLES:
            token = _token(values, role)
            if token is not None:
                found.setdefault(role, token)
    return found


def _token(values: Any, role: str) -> str | int | None:
    """`{role}_token` (a string or {"content": string}) or `{role}_token_id` (an id or a list of ids)."""
    token = values.get(f"{role}_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    number = values.get(f"{role}_token_id")
    if isinstance(number, list) and number:
        number = number[0]
    return number if isinstance(number, int) else None
