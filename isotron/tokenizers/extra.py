"""Sentinel ids behind a vocabulary: <extra_id_0>, <extra_id_1>, .. for models that learn to fill in spans. PURE."""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

from isotron.tokenizers.base import FileTokenizer, Flat, Tokenizer


class WithExtraIds(FileTokenizer):
    """`inner` with `count` more ids at the end of its vocabulary, which no text produces."""

    def __init__(self, inner: FileTokenizer, count: int) -> None:
        super().__init__(inner.files, inner.extras)
        self.inner, self.count, self.type_name = inner, count, inner.type_name
        self.eod, self.bos, self.eos, self.pad = inner.eod, inner.bos, inner.eos, inner.pad
        self.unk, self.sep, self.cls, self.mask = inner.unk, inner.sep, inner.cls, inner.mask
        self.prefix, self.notes = inner.prefix, inner.notes
        self.vocab_size = inner.vocab_size + count
        self.extra_ids = (*inner.extra_ids, *range(inner.vocab_size, self.vocab_size))

    def describe(self) -> dict[str, Any]:
        """The descriptor of `inner` with the size and the sentinels of this one."""
        return super().describe() | {"vocab_extra_ids": self.count}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        return self.inner.encode_batch(texts)

    def encode_flat(self, texts: list[str]) -> Flat:
        """The ids of all texts in a row, and the length of each."""
        return self.inner.encode_flat(texts)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, sentinels as <extra_id_N>."""
        names = {token: f"<extra_id_{number}>" for number, token in enumerate(self.extra_ids)}
        runs = groupby(ids, key=lambda token: token >= self.inner.vocab_size)
        return "".join(
            "".join(names[token] for token in run) if extra else cast(Tokenizer, self.inner).decode(list(run))
            for extra, run in runs
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (WithExtraIds, (self.inner, self.count))
