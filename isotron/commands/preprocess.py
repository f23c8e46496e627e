"""`isotron preprocess`: text to Megatron's .bin/.idx, on one machine or in parts on many."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON
from isotron.config.argv import Parsed, parse
from isotron.config.catalogue import Option, catalogue
from isotron.core.errors import Problem, Refused
from isotron.data.sentences import LANGUAGES

OWN = {
    "input": Option(
        "input", "strs", (), "JSON lines or arrays, also .gz or .zst; Parquet, Arrow; patterns; `datasets` directories"
    ),
    "output_prefix": Option("output_prefix", "str", "", "writes PREFIX_KEY_document.bin and .idx"),
    "json_keys": Option("json_keys", "strs", ("text",), "keys to tokenize, each to files of its own"),
    "append_eod": Option("append_eod", "bool", False, "end each document with the end-of-document token"),
    "workers": Option("workers", "int", 0, "processes; 0 means the cores of this machine"),
    "on_bad_line": Option(
        "on_bad_line", "str", "error", "what to do with an unreadable record", choices=("error", "skip")
    ),
    "split_sentences": Option("split_sentences", "bool", False, "a sequence for each sentence, for BERT and T5 data"),
    "keep_newlines": Option("keep_newlines", "bool", False, "sentences keep the white space behind them"),
    "lang": Option(
        "lang", "str", "english", "language of the sentences: its abbreviations end none", choices=LANGUAGES
    ),
    "max_documents": Option("max_documents", "int", 0, "stop after so many records; 0 means all"),
    "max_document_tokens": Option("max_document_tokens", "int", 0, "cut longer documents there; 0 means never"),
    "partitions": Option("partitions", "int", 1, "parts of the input, for several machines"),
    "partition": Option("partition", "int", -1, "write this part of --partitions, counted from 0; -1 means all"),
    "merge_partitions": Option("merge_partitions", "bool", False, "join the parts that --partition runs have written"),
    "merge": Option("merge", "strs", (), "join these .bin/.idx prefixes into --output-prefix; no --input"),
    **JSON,
}
TOKENIZER = {n: o for n, o in catalogue().items() if o.section == "tokenizer" or n == "vocab_size"}


def run(words: Sequence[str]) -> int:
    """Preprocess as the words say; returns the exit code."""
    parsed = parse(words, {**OWN, **TOKENIZER})
    values = {n: o.default for n, o in {**OWN, **TOKENIZER}.items()} | {k: g.value for k, g in parsed.given.items()}
    if values["merge"] or values["merge_partitions"]:
        return _join(parsed, values)
    tokenizer = _checked(parsed, values)
    from isotron.data.preprocess import preprocess
    from isotron.data.records import Share

    as_json = bool(values["json"])
    summary = preprocess(
        values["input"],
        values["output_prefix"],
        tokenizer,
        json_keys=values["json_keys"],
        append_eod=values["append_eod"],
        workers=values["workers"] or None,
        on_bad_line=values["on_bad_line"],
        split_sentences=values["split_sentences"],
        keep_newlines=values["keep_newlines"],
        lang=values["lang"],
        max_documents=values["max_documents"],
        max_document_tokens=values["max_document_tokens"],
        share=Share(values["partition"], values["partitions"]) if values["partition"] >= 0 else Share(),
        **({"log": _quiet} if as_json else {}),
    )
    print(json.dumps(asdict(summary)) if as_json else summary)
    return 0


def _join(parsed: Parsed, values: dict[str, Any]) -> int:
    """Join pairs that exist: the parts of one job, or any that the same tokenizer made."""
    from isotron.data.indexed import IndexedDataset
    from isotron.data.indexed_writer import merge
    from isotron.data.partitions import join

    problems = list(parsed.problems)
    if not values["output_prefix"] and "output_prefix" not in parsed.doubtful:
        problems.append(Problem("--output-prefix not given", "the files to write have no name", "--output-prefix all"))
    if values["merge"] and (values["merge_partitions"] or values["input"]):
        also = "--merge-partitions" if values["merge_partitions"] else f"--input {' '.join(values['input'])}"
        case = "--merge joins token files that exist already, and nothing else"
        problems.append(Problem(f"--merge {' '.join(values['merge'])} {also}", case, "one of the two"))
    if problems:
        raise Refused(problems)
    if values["merge"]:
        merge(values["merge"], values["output_prefix"])
        outputs = [values["output_prefix"]]
    else:
        level = "sentence" if values["split_sentences"] else "document"
        outputs = join(
            values["output_prefix"], max(values["partitions"], 1), [f"{key}_{level}" for key in values["json_keys"]]
        )
    opened = [IndexedDataset(output) for output in outputs]
    totals = {"documents": sum(d.documents for d in opened), "tokens": sum(d.tokens for d in opened)}
    if values["json"]:
        print(json.dumps({"outputs": outputs, **totals}))
    else:
        files = ", ".join(f"{output}.bin/.idx" for output in outputs)
        print(f"{totals['documents']:,} documents, {totals['tokens']:,} tokens -> {files}")
    return 0


def _quiet(_line: str) -> None:
    """No progress lines on stdout beside a JSON result."""


def _checked(parsed: Parsed, values: dict[str, Any]) -> Any:
    """The tokenizer, once nothing is wrong; every problem is raised at once."""
    from isotron.tokenizers.build import build_tokenizer
    from isotron.tokenizers.config import TokenizerConfig

    problems, tokenizer = list(parsed.problems), None
    if not values["input"] and "input" not in parsed.doubtful:
        problems.append(Problem("--input not given", "there is no text to read", "--input corpus.jsonl"))
    if not values["output_prefix"] and "output_prefix" not in parsed.doubtful:
        fix = f"--output-prefix {Path((values['input'] or ('corpus.jsonl',))[0]).stem.replace('*', 'corpus')}"
        problems.append(Problem("--output-prefix not given", "the files to write have no name", fix))
    if values["workers"] < 0:
        problems.append(
            Problem(f"--workers {values['workers']}", "at least one process is needed", f"--workers {os.cpu_count()}")
        )
    if not parsed.doubtful.intersection(TOKENIZER):
        try:
            fields = {n: values[n] for n in TokenizerConfig.__dataclass_fields__}
            tokenizer = build_tokenizer(TokenizerConfig(**fields), values["vocab_size"])
        except Refused as refused:
            problems += refused.problems
    if problems:
        raise Refused(problems)
    for note in (*parsed.notes, *_whole(values)):
        print(f"note: {note}", file=sys.stderr)
    return tokenizer


def _whole(values: dict[str, Any]) -> list[str]:
    """What is said when partitions are given without the one to write: Megatron's command does all of them itself."""
    if values["partitions"] > 1 and values["partition"] < 0:
        return ["--partitions without --partition: this command writes the whole output, the same bytes"]
    return []


def help_text() -> str:
    """The options of preprocess."""
    usage = "isotron preprocess --input corpus.jsonl --output-prefix data/corpus TOKENIZER OPTIONS"
    return options_help(usage, {"[command]": OWN.values(), "[tokenizer]": TOKENIZER.values()})
