"""From the `[tokenizer]` options, or from a checkpoint's directory, to a tokenizer. PURE; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

from isotron.core.errors import refuse
from isotron.tokenizers.base import FileTokenizer, Tokenizer, need_file, unreadable
from isotron.tokenizers.config import DESCRIPTOR, TYPES, TokenizerConfig
from isotron.tokenizers.extra import WithExtraIds
from isotron.tokenizers.gpt2_bpe import GPT2BPETokenizer
from isotron.tokenizers.huggingface import HuggingFaceTokenizer
from isotron.tokenizers.null import NullTokenizer
from isotron.tokenizers.sentencepiece import SentencePieceTokenizer
from isotron.tokenizers.tiktoken_file import TikTokenizer
from isotron.tokenizers.wordpiece import BertWordPieceCase, BertWordPieceLowerCase, wordpiece_type

_FROM_MODEL: dict[str, Callable[[str], Tokenizer]] = {
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "TikTokenizer": TikTokenizer,
}
_WORDPIECE: dict[str, Callable[[str], Tokenizer]] = {
    kind.type_name: kind for kind in (BertWordPieceLowerCase, BertWordPieceCase)
}


def build_tokenizer(config: TokenizerConfig, vocab_size: int = 0) -> Tokenizer:
    """The tokenizer that the options describe; `vocab_size` is read by the null tokenizer only."""
    if config.tokenizer_model and (Path(config.tokenizer_model).expanduser() / DESCRIPTOR).is_file():
        return _stored(config)
    made, count = _build(config, vocab_size), config.vocab_extra_ids
    if count < 0:
        raise refuse(f"--vocab-extra-ids {count}", "it is a number of ids", "--vocab-extra-ids 100")
    return WithExtraIds(cast(FileTokenizer, made), count) if count else made


def _build(config: TokenizerConfig, vocab_size: int) -> Tokenizer:
    if config.tokenizer_type == "auto":
        config = _resolve(config)
    kind = config.tokenizer_type
    if kind == "NullTokenizer":
        return NullTokenizer(vocab_size)
    if kind == "GPT2BPETokenizer":
        _need_option(kind, "--vocab-file", config.vocab_file)
        _need_option(kind, "--merge-file", config.merge_file)
        return GPT2BPETokenizer(config.vocab_file, config.merge_file)
    if kind in _WORDPIECE:
        _need_option(kind, "--vocab-file", config.vocab_file)
        return _WORDPIECE[kind](config.vocab_file)
    if kind in _FROM_MODEL:
        _need_option(kind, "--tokenizer-model", config.tokenizer_model)
        return _FROM_MODEL[kind](config.tokenizer_model)
    raise refuse(f"--tokenizer-type {kind}", f"the types are {', '.join(TYPES)}", "--tokenizer-type auto")


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer that `save` stored in `directory`, refused when its files no longer give the same ids."""
    folder = Path(directory).expanduser()
    path = need_file(folder / DESCRIPTOR, "tokenizer of a checkpoint")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        extra = int(stored.get("vocab_extra_ids", 0))
        kind, size = str(stored["type"]), int(stored["vocab_size"]) - extra
        files = {option: str(folder / name) for option, name in stored["files"].items()}
        config = TokenizerConfig(tokenizer_type=kind, vocab_extra_ids=extra, **files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable("tokenizer of a checkpoint", path, error, "tokenizer descriptor") from error
    tokenizer = build_tokenizer(config, size)
    now = tokenizer.describe()
    always = ("vocab_size", "eod", "bos", "eos", "pad", "sha256")
    later = [key for key in ("unk", "sep", "cls", "mask", "extra_ids") if key in stored]  # older copies have none
    changed = [key for key in (*always, *later) if now[key] != stored.get(key)]
    if changed:
        raise refuse(
            f"the tokenizer in {folder}",
            f"its files give another {', '.join(changed)} than {DESCRIPTOR} recorded",
            "the directory as it was saved, unchanged",
        )
    return tokenizer


def _stored(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a directory that `save` wrote, refused when another type is asked for."""
    tokenizer = load_tokenizer(config.tokenizer_model)
    kind, extra = tokenizer.describe()["type"], tokenizer.describe().get("vocab_extra_ids", 0)
    if config.vocab_extra_ids not in (0, extra):
        raise refuse(
            f"--vocab-extra-ids {config.vocab_extra_ids} --tokenizer-model {config.tokenizer_model}",
            f"the tokenizer in that directory was stored with {extra}",
            f"--vocab-extra-ids {extra}, or leave it out",
        )
    if config.tokenizer_type not in ("auto", kind):
        raise refuse(
            f"--tokenizer-type {config.tokenizer_type} --tokenizer-model {config.tokenizer_model}",
            f"that directory holds a {kind}",
            f"--tokenizer-type {kind}, or auto",
        )
    return tokenizer


def _resolve(config: TokenizerConfig) -> TokenizerConfig:
    """The options with `auto` replaced by what the files are."""
    model, vocab, merges = config.tokenizer_model, config.vocab_file, config.merge_file
    if not model and not vocab and not merges:
        raise refuse(
            "--tokenizer-type auto without any file",
            "the tokenizer is told by its files, and none is given",
            "--vocab-file vocab.json --merge-file merges.txt, or --tokenizer-model FILE",
        )
    if not model and vocab.endswith(".txt") and not merges:
        return TokenizerConfig(wordpiece_type(vocab), "", vocab)
    if not model:
        return TokenizerConfig("GPT2BPETokenizer", "", vocab, merges)
    if vocab or merges:
        raise refuse(
            f"--tokenizer-model {model} with --vocab-file {vocab} --merge-file {merges}",
            "under --tokenizer-type auto only one kind of file may be given",
            f"--tokenizer-model {model} alone",
        )
    return _resolve_model(model)


def _resolve_model(model: str) -> TokenizerConfig:
    """What one --tokenizer-model is, by the name of the file or by what the directory holds."""
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return TokenizerConfig("HuggingFaceTokenizer", model)
        if (path / "tokenizer.model").is_file():
            return TokenizerConfig("SentencePieceTokenizer", str(path / "tokenizer.model"))
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return TokenizerConfig("GPT2BPETokenizer", "", str(path / "vocab.json"), str(path / "merges.txt"))
        if (path / "vocab.txt").is_file():
            return TokenizerConfig(wordpiece_type(path / "vocab.txt"), "", str(path / "vocab.txt"))
        raise refuse(
            f"--tokenizer-model {model}",
            "the directory holds no tokenizer.json, tokenizer.model, vocab.json with merges.txt, or vocab.txt",
            "--tokenizer-model with a directory that does, or with the file itself",
        )
    kinds = {".model": "SentencePieceTokenizer", ".tiktoken": "TikTokenizer", ".json": "HuggingFaceTokenizer"}
    if path.suffix not in kinds:
        raise refuse(
            f"--tokenizer-model {model}",
            f"the ending {path.suffix or '(none)'} tells no tokenizer; known are {', '.join(kinds)}",
            f"--tokenizer-type with one of {', '.join(_FROM_MODEL)}",
        )
    return TokenizerConfig(kinds[path.suffix], model)


def _need_option(kind: str, option: str, value: str) -> None:
    if not value:
        raise refuse(f"--tokenizer-type {kind} without {option}", f"{kind} reads {option}", f"{option} PATH")
