"""BERT's WordPiece from a `vocab.txt`. PURE. [SEP] ends a document; text never produces [CLS], [SEP] or [MASK]."""

from __future__ import annotations

import json
from pathlib import Path

from isotron.core.errors import refuse
from isotron.tokenizers.base import FileTokenizer, ids_by, need_file, need_library, unreadable

ROLES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


class WordPieceTokenizer(FileTokenizer):
    """WordPiece over words split at white space and punctuation; `lower_case` also strips accents, as BERT does."""

    lower_case = True

    def __init__(self, vocab_file: str | Path) -> None:
        path = need_file(vocab_file, "--vocab-file")
        config = path.parent / "tokenizer_config.json"
        super().__init__({"vocab_file": path}, (config,) if config.is_file() else ())
        library = need_library("tokenizers", f"--tokenizer-type {self.type_name}")
        vocab = _read_vocab(path)
        model = library.models.WordPiece(vocab, unk_token=ROLES["unk"], max_input_chars_per_word=100)
        self._tokenizer = library.Tokenizer(model)
        self._tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=self.lower_case)
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        self._tokenizer.decoder = library.decoders.WordPiece()
        self.vocab_size = max(vocab.values()) + 1
        self.pad, self.unk, self.cls, self.sep, self.mask = (vocab[token] for token in ROLES.values())
        self.eod = self.eos = self.sep
        self.prefix = (self.cls,)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        return ids_by(self._tokenizer, texts)

    def is_continuation(self, token: int) -> bool:
        """Whether the token goes on with the word of the one before: whole words are masked together."""
        return str(self._tokenizer.id_to_token(token)).startswith("##")

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, words joined by single spaces."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class BertWordPieceLowerCase(WordPieceTokenizer):
    """Uncased BERT."""

    type_name = "BertWordPieceLowerCase"


class BertWordPieceCase(WordPieceTokenizer):
    """Cased BERT."""

    type_name = "BertWordPieceCase"
    lower_case = False


def wordpiece_type(vocab_file: str | Path) -> str:
    """Which of the two a vocab.txt is: `do_lower_case` of the tokenizer_config.json beside it, else uncased."""
    config = Path(vocab_file).expanduser().parent / "tokenizer_config.json"
    if config.is_file():
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise unreadable("--vocab-file", config, error, "JSON file beside vocab.txt") from error
        if isinstance(values, dict) and values.get("do_lower_case") is False:
            return BertWordPieceCase.type_name
    return BertWordPieceLowerCase.type_name


def _read_vocab(path: Path) -> dict[str, int]:
    """token -> its line, refused when a special token is missing or a token stands twice."""
    try:
        tokens = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise unreadable("--vocab-file", path, error, "vocab.txt (one token a line)") from error
    tokens = [token.rstrip("\r") for token in (tokens[:-1] if not tokens[-1] else tokens)]
    vocab = {token: number for number, token in enumerate(tokens)}
    missing = [token for token in ROLES.values() if token not in vocab]
    if missing or len(vocab) != len(tokens):
        case = f"it has no {', '.join(missing)}" if missing else f"{len(tokens) - len(vocab)} tokens stand there twice"
        raise refuse(f"--vocab-file {path}", case, "the vocab.txt of a BERT model, one token a line")
    return vocab
