"""A tokenizer for data that already is ids: the text `12 7 9` is the ids 12, 7, 9. PURE."""

from __future__ import annotations

from typing import Any

from isotron.core.errors import refuse
from isotron.tokenizers.base import FileTokenizer


class NullTokenizer(FileTokenizer):
    """Ids separated by white space; the last id of the vocabulary ends a document."""

    type_name = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        super().__init__({})
        if vocab_size < 2:
            raise refuse(
                f"--tokenizer-type NullTokenizer with a vocabulary of {vocab_size}",
                "it has no files, so the size of the vocabulary (at least 2) must be given",
                "--vocab-size 32000",
            )
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids written in each text."""
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> list[int]:
        words = text.split()
        try:
            ids = [int(word) for word in words]
        except ValueError as error:
            raise refuse(
                f"--tokenizer-type NullTokenizer on the text {text[:40]!r}",
                f"every word must be an id: {error}",
                "texts such as '12 7 9', or --vocab-file and --merge-file for real text",
            ) from error
        wrong = [i for i in ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise refuse(
                f"--tokenizer-type NullTokenizer with a vocabulary of {self.vocab_size}",
                f"the text has the id {wrong[0]}, ids are 0..{self.vocab_size - 1}",
                f"--vocab-size {max(max(ids) + 2, self.vocab_size)}",
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        """The ids, separated by single spaces."""
        return " ".join(str(i) for i in ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return (NullTokenizer, (self.vocab_size,))
