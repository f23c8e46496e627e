"""GPT-2's byte-level BPE from `vocab.json` and `merges.txt`. PURE.

Text that spells `<|endoftext|>` becomes that one token, as in the Hugging Face GPT-2 tokenizer.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

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


class GPT2BPETokenizer(FileTokenizer):
    """Byte-level BPE; `<|endoftext|>` of the vocabulary is eod, bos and eos."""

    type_name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        vocab_path, merge_path = need_file(vocab_file, "--vocab-file"), need_file(merge_file, "--merge-file")
        super().__init__({"vocab_file": vocab_path, "merge_file": merge_path})
        library = need_library("tokenizers", "--tokenizer-type GPT2BPETokenizer")
        vocab = _read_vocab(vocab_path)
        try:
            model = library.models.BPE.from_file(str(vocab_path), str(merge_path))
        except Exception as error:  # the library raises bare Exception for merges that do not fit the vocabulary
            raise unreadable("--merge-file", merge_path, error, "merges.txt of this vocab.json") from error
        self._tokenizer = library.Tokenizer(model)
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = library.decoders.ByteLevel()
        self._tokenizer.add_special_tokens([END_OF_TEXT])
        self.vocab_size = max(vocab.values()) + 1
        self.eod = self.bos = self.eos = vocab[END_OF_TEXT]

    @cached_property
    def _fast(self) -> FastBPE | None:
        return fast_bpe(self._tokenizer.to_str(), self.encode)

    def encode_flat(self, texts: list[str]) -> Flat:
        """The ids of all texts in a row, and the length of each, by the fastest library that is known to be exact."""
        return super().encode_flat(texts) if self._fast is None else joined([self._fast(text) for text in texts])

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        return ids_by(self._tokenizer, texts)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _read_vocab(path: Path) -> dict[str, int]:
    """The table token -> id, refused when it is not one or lacks the end-of-document token."""
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise unreadable("--vocab-file", path, error, "vocab.json (token -> id)") from error
    if not isinstance(vocab, dict) or not all(isinstance(i, int) and i >= 0 for i in vocab.values()):
        raise refuse(
            f"--vocab-file {path}",
            "a vocab.json is one JSON object from token to id >= 0, this is not",
            "the vocab.json that belongs to --merge-file",
        )
    if END_OF_TEXT not in vocab:
        raise refuse(
            f"--vocab-file {path}",
            f"it has no entry {END_OF_TEXT}, which ends a document",
            "a GPT-2 vocab.json, or --tokenizer-model tokenizer.json for another byte-level BPE",
        )
    return vocab
