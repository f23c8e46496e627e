"""A SentencePiece `.model` file. PURE. The model's own eos ends a document.

Which special pieces exist follows from the model: Llama's have bos 1 and eos 2 and begin a text with bos; T5's have
pad 0 and eos 1, no bos, and sentinels <extra_id_0>, .. where the model holds them.
"""

from __future__ import annotations

from itertools import count, takewhile
from pathlib import Path

from isotron.core.errors import refuse
from isotron.tokenizers.base import FileTokenizer, need_file, need_library, unreadable


class SentencePieceTokenizer(FileTokenizer):
    """SentencePiece BPE or unigram; text never produces control pieces such as <s>."""

    type_name = "SentencePieceTokenizer"

    def __init__(self, tokenizer_model: str | Path) -> None:
        path = need_file(tokenizer_model, "--tokenizer-model")
        super().__init__({"tokenizer_model": path})
        library = need_library("sentencepiece", "--tokenizer-type SentencePieceTokenizer")
        try:
            self._processor = library.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise unreadable("--tokenizer-model", path, error, "SentencePiece model") from error
        self.vocab_size = self._processor.vocab_size()
        # the library answers -1 for a piece that the model does not have
        bos, eos, pad = self._processor.bos_id(), self._processor.eos_id(), self._processor.pad_id()
        self.bos, self.eos, self.pad = (i if i >= 0 else None for i in (bos, eos, pad))
        if self.eos is None:
            raise refuse(
                f"--tokenizer-model {path}",
                "the model has no end-of-sequence piece, which ends a document",
                "a model trained with an eos piece (the default of spm_train)",
            )
        self.eod = self.eos
        self.unk = self._processor.unk_id()
        pieces = (self._processor.piece_to_id(f"<extra_id_{n}>") for n in count())
        self.extra_ids = tuple(takewhile(lambda i: i != self.unk, pieces))
        self.prefix = () if self.bos is None else (self.bos,)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        # one thread: several would come on top of the worker processes of preprocess
        batch: list[list[int]] = self._processor.encode(texts, num_threads=1)
        return batch

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; control pieces are left out."""
        return str(self._processor.decode([int(i) for i in ids]))
