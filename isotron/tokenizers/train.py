"""Training a tokenizer: byte-level BPE, or Unigram over bytes, written as a Hugging Face tokenizer.json. PURE.

Both work on bytes split by GPT-2's pattern, so that every text has ids and comes back as it was. The same corpus gives
the same file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from isotron.core.errors import refuse
from isotron.tokenizers.base import END_OF_TEXT, need_library

KINDS = ("bpe", "unigram")
BYTES = 256


def train_tokenizer(
    texts: Iterable[str], kind: str, vocab_size: int, directory: str | Path, special_tokens: Sequence[str] = ()
) -> int:
    """Train on `texts` and write tokenizer.json and tokenizer_config.json into `directory`; the size reached.

    `<|endoftext|>` is id 0 and ends a document; `special_tokens` follow. Refused: a vocabulary too small for the bytes
    and the special tokens, or a corpus without any text.
    """
    specials = [END_OF_TEXT, *(t for t in special_tokens if t != END_OF_TEXT)]
    if kind not in KINDS:
        raise refuse(f"--kind {kind}", f"the kinds are {', '.join(KINDS)}", f"--kind {KINDS[0]}")
    least = BYTES + len(specials)
    if vocab_size < least:
        case = f"{BYTES} bytes and {len(specials)} special tokens need {least} entries"
        raise refuse(f"--vocab-size {vocab_size}", case, f"--vocab-size {max(least, 32000)}")
    library = need_library("tokenizers", "isotron tokenizer train")
    tokenizer, trainer = (
        _bpe(library, vocab_size, specials) if kind == "bpe" else _unigram(library, vocab_size, specials)
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    counted = _Counted(texts)
    tokenizer.train_from_iterator(iter(counted), trainer)
    if counted.texts == 0:
        case = "the input holds no text to learn from"
        raise refuse("isotron tokenizer train", case, "--input with JSON lines that hold text", exit_code=1)
    _write(tokenizer, Path(directory))
    return int(tokenizer.get_vocab_size(with_added_tokens=True))


def _bpe(library: Any, size: int, specials: list[str]) -> tuple[Any, Any]:
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    return library.Tokenizer(library.models.BPE()), trainer


def _unigram(library: Any, size: int, specials: list[str]) -> tuple[Any, Any]:
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.UnigramTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, unk_token=None, show_progress=False
    )
    return library.Tokenizer(library.models.Unigram()), trainer


class _Counted:
    """Texts, counted as they go by."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._from, self.texts = texts, 0

    def __iter__(self) -> Iterator[str]:
        for text in self._from:
            self.texts += bool(text.strip())
            yield text


def _write(tokenizer: Any, directory: Path) -> None:
    """Both files, each through a temporary one."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.dumps({"eos_token": END_OF_TEXT}) + "\n"
    for name, text in (("tokenizer_config.json", config), ("tokenizer.json", tokenizer.to_str(pretty=True))):
        temporary = directory / f"{name}.tmp-{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(directory / name)
