"""`isotron finetune`: `isotron train --finetune` with what such a run usually leaves out.

The weights, the model config, the tokenizer, the sequence length and the dtype come from `--load`. A data directory
may hold .bin/.idx pairs, or JSON lines with a "text" or a conversation ("messages") each, which are tokenized once
beside them. Of conversations only the answers carry loss, and each is seen by itself. The run is one pass
over the data at a learning rate of 2e-5 unless told otherwise.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotron.commands import train
from isotron.commands.run_options import JSON, device_count, run_help
from isotron.config.argv import Parsed, parse
from isotron.config.check import finish
from isotron.config.load import options, read
from isotron.config.resume import Found, find_checkpoint
from isotron.config.rules_run import data_prefixes
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem, Refused, refuse

LR = "2e-5"
LENGTH = ("train_iters", "@train_samples", "config")
TEXTS = ("*.jsonl", "*.json", "*.ndjson", "*.jsonl.gz", "*.json.gz")


def run(words: Sequence[str]) -> int:
    """Fine-tune as the words say; returns the exit code."""
    return train.run(completed(words, _say))


def _say(line: str) -> None:
    print(f"note: {line}", file=sys.stderr)


def completed(words: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """The words of `isotron train` that they stand for."""
    parsed = parse(words, options(JSON))
    usual = [] if "config" in parsed.given else ["--lr", LR]  # a file says its own rate
    full = ["--finetune", *usual, *words]
    if parsed.problems:
        return full  # `train` finds the same and more, and says all of it
    if "load" not in parsed.given and "config" not in parsed.given:
        fix = "--load runs/first, or a Hugging Face directory"
        raise Refused([Problem("--load not given", "fine-tuning begins with the weights of a model", fix)])
    found = find_checkpoint(parsed.given["load"].value, "") if "load" in parsed.given else Found()
    data = _data(parsed, found, say)
    full += ["--data-path", *data] if data else []
    if data and "pack_documents" not in parsed.given and _are_conversations(data):
        full += ["--pack-documents"]
    if data and not any(name in parsed.given for name in LENGTH):
        steps, why = _one_pass(read(full, found.config, JSON).config, data)
        say(why)
        full += ["--train-iters", str(steps)]
    return full


# ---- data ----------------------------------------------------------------------------------------------------------


def _data(parsed: Parsed, found: Found, say: Callable[[str], None]) -> list[str]:
    """`--data-path` with every directory replaced by the prefixes in it."""
    given: Sequence[str] = parsed.given["data_path"].value if "data_path" in parsed.given else ()
    if not any(Path(word).is_dir() for word in given):
        return list(given)
    if len(given) > 1 and len(data_prefixes(tuple(given))) < len(given):
        raise refuse(
            f"--data-path {' '.join(given)}",
            "a weight belongs to a prefix, not to a directory",
            "--data-path DIR alone",
        )
    return [
        prefix
        for word in given
        for prefix in (_in_directory(Path(word), found, say) if Path(word).is_dir() else [word])
    ]


def _in_directory(directory: Path, found: Found, say: Callable[[str], None]) -> list[str]:
    pairs = sorted(str(idx)[:-4] for idx in directory.glob("*.idx") if not idx.name.endswith(".answers.idx"))
    if pairs:
        return pairs
    texts = sorted({file for pattern in TEXTS for file in directory.glob(pattern)})
    if not texts:
        case = "the directory holds neither .bin/.idx pairs nor JSON lines"
        raise refuse(f"--data-path {directory}", case, 'a directory with FILE.jsonl, one {"text": ...} a line')
    return [_tokenized(directory, texts, found, say)]


def _tokenized(directory: Path, texts: Sequence[Path], found: Found, say: Callable[[str], None]) -> str:
    """The prefix of the directory's texts under the checkpoint's tokenizer; made once for these texts."""
    from isotron.data.chat import is_chat, preprocess_chat
    from isotron.data.preprocess import preprocess
    from isotron.launch import from_environment
    from isotron.tokenizers.build import build_tokenizer
    from isotron.tokenizers.config import TokenizerConfig

    table: Mapping[str, Any] = (found.config or {}).get("tokenizer", {})
    tokenizer = build_tokenizer(TokenizerConfig(**table))
    stamps = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in texts]
    chats = [is_chat(file) for file in texts]
    if any(chats) and not all(chats):
        case = f"{texts[chats.index(True)].name} holds conversations, {texts[chats.index(False)].name} texts"
        raise refuse(f"--data-path {directory}", case, "a directory for each, blended by weight")
    template = _template(table, directory) if chats[0] else None
    made_by = [stamps, tokenizer.describe(), *([] if template is None else [template.source])]
    name = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:12]
    prefix = directory / "tokenized" / name
    result = f"{prefix}_text_document"
    if not Path(result + ".idx").is_file():
        if from_environment() is not None:
            fix = "isotron finetune with the same options and --print-config, once, before the launcher: it tokenizes"
            raise refuse(
                f"--data-path {directory} under a launcher", "every process would tokenize the same texts", fix
            )
        prefix.parent.mkdir(exist_ok=True)
        if template is not None:
            preprocess_chat(texts, result, tokenizer, template, log=say)
            return result
        preprocess([str(f) for f in texts], prefix, tokenizer, append_eod=True, log=say)
        say(f"{len(texts)} files of {directory} are tokenized as {result}")
    return result


def _template(table: Mapping[str, Any], directory: Path) -> Any:
    """The chat template of the checkpoint's tokenizer."""
    from isotron.tokenizers.chat import read_template

    model = Path(str(table.get("tokenizer_model", "")))
    template = read_template(model if model.is_dir() else model.parent)
    if template is None:
        raise refuse(
            f"--data-path {directory}",
            f"it holds conversations, and the tokenizer in {model} has no chat template to write them with",
            "a file chat_template.jinja beside the tokenizer's files",
        )
    return template


def _are_conversations(data: Sequence[str]) -> bool:
    """Whether some prefix says which of its tokens are answers."""
    from isotron.data.blend import ANSWERS

    return any(Path(f"{word}{end}{ANSWERS}.idx").is_file() for word in data for end in ("", "_text_document"))


def _one_pass(config: RunConfig, data: Sequence[str]) -> tuple[int, str]:
    """Steps of one pass over the training part of the data, and the arithmetic as a line."""
    from isotron.data.blend import find_prefixes
    from isotron.data.indexed import IndexedDataset

    config = finish(config, None, device_count(config.train.device))
    prefixes = [p for word in data_prefixes(tuple(data)) for p in find_prefixes(word, "--data-path")]
    tokens = sum(IndexedDataset(p).tokens for p in prefixes)
    parts = [float(p) for p in config.data.split.split(",")]
    if config.data.pack_documents:
        return _one_packed_pass(config, prefixes)
    own = tokens if config.data.valid_data_path else int(tokens * parts[0] / sum(parts))
    sequence, batch = config.data.seq_length, config.train.global_batch_size
    steps = max(1, own // (sequence * max(batch, 1)))
    return steps, f"--train-iters {steps}: one pass over {own:,} tokens in steps of {batch} x {sequence}"


def _one_packed_pass(config: RunConfig, prefixes: Sequence[str]) -> tuple[int, str]:
    """Steps of one pass over packed rows, and the arithmetic as a line."""
    from isotron.data.gpt_dataset import split_documents
    from isotron.data.indexed import IndexedDataset
    from isotron.data.packed import PackedDataset

    rows, batch = 0, max(config.train.global_batch_size, 1)
    for data in map(IndexedDataset, prefixes):
        documents = split_documents("1" if config.data.valid_data_path else config.data.split, len(data))[0]
        rows += len(PackedDataset(data, documents, None, config.data.seq_length, 0, log=lambda _: None))
    steps = max(1, rows // batch)
    return steps, f"--train-iters {steps}: one pass over {rows:,} packed rows in steps of {batch}"


def help_text() -> str:
    """The options of finetune."""
    usage = "isotron finetune --load DIR --data-path DIR_OR_PREFIX [--OPTION VALUE ..]: isotron train --finetune, with"
    return run_help(f"{usage} --lr {LR} and one pass over the data by default", JSON)
