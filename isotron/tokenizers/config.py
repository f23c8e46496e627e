"""Options of the tokenizer: the config section `[tokenizer]`. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.options import option

DESCRIPTOR = "isotron_tokenizer.json"  # in a directory that a checkpoint's tokenizer is stored in
TYPES = (
    "auto",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "NullTokenizer",
)


@dataclass(frozen=True)
class TokenizerConfig:
    """Local files of a tokenizer; nothing is ever downloaded."""

    tokenizer_type: str = option("auto", "auto looks at the files that are given", choices=TYPES)
    tokenizer_model: str = option("", "tokenizer.json or its directory, a SentencePiece .model, or a .tiktoken file")
    vocab_file: str = option("", "vocab.json of a byte-level BPE, or vocab.txt of a WordPiece")
    merge_file: str = option("", "merges.txt of a byte-level BPE")
    vocab_extra_ids: int = option(0, "sentinel ids <extra_id_0>, .. put behind the vocabulary")
