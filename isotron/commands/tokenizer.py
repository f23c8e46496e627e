"""`isotron tokenizer train|inspect`: learn a tokenizer from a corpus, or look at one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON
from isotron.config.argv import parse
from isotron.config.catalogue import Option, catalogue
from isotron.core.errors import Problem, Refused, refuse

KINDS = ("bpe", "unigram")
TRAIN = {
    "input": Option("input", "strs", (), "JSON lines and the other inputs of isotron preprocess"),
    "output": Option("output", "str", "", "directory for tokenizer.json and tokenizer_config.json"),
    "kind": Option("kind", "str", "bpe", "bpe or unigram, both over bytes", choices=KINDS),
    "vocab_size": Option("vocab_size", "int", 32000, "entries of the vocabulary, special tokens among them"),
    "json_keys": Option("json_keys", "strs", ("text",), "keys whose texts are learned from"),
    "special_tokens": Option("special_tokens", "strs", (), "further special tokens, behind <|endoftext|>"),
    "max_documents": Option("max_documents", "int", 0, "learn from so many records; 0 means all"),
    **JSON,
}
FILES = {n: o for n, o in catalogue().items() if o.section == "tokenizer" or n == "vocab_size"}
LOOK = {**FILES, "text": Option("text", "strs", (), "texts to show the tokens of"), **JSON}


def run(words: Sequence[str]) -> int:
    """Train or inspect as the words say; returns the exit code."""
    if not words or words[0] not in _ACTIONS:
        asked = f"isotron tokenizer {words[0] if words else ''}".rstrip()
        fix = "isotron tokenizer train --input corpus.jsonl --output my_tokenizer"
        raise refuse(asked, f"the actions are {', '.join(_ACTIONS)}", fix)
    return _ACTIONS[words[0]](words[1:])


def _read(words: Sequence[str], options: dict[str, Option]) -> tuple[dict[str, Any], list[Problem]]:
    parsed = parse(words, options)
    return {n: o.default for n, o in options.items()} | {k: g.value for k, g in parsed.given.items()}, [
        *parsed.problems
    ]


def _train(words: Sequence[str]) -> int:
    values, problems = _read(words, TRAIN)
    for name, example in (("input", "corpus.jsonl"), ("output", "my_tokenizer")):
        if not values[name]:
            problems.append(Problem(f"--{name} not given", "training needs it", f"--{name} {example}"))
    if problems:
        raise Refused(problems)
    from isotron.tokenizers.train import train_tokenizer

    replaced = (Path(values["output"]) / "tokenizer.json").exists()
    size = train_tokenizer(
        _texts(values), values["kind"], values["vocab_size"], values["output"], values["special_tokens"]
    )
    result = {"output": values["output"], "kind": values["kind"], "vocab_size": size, "replaced": replaced}
    few = f" (the corpus gives no more than that; {values['vocab_size']} were asked for)"
    short = few if size < values["vocab_size"] else ""
    again = ", in place of the one that was there" if replaced else ""
    said = f"{values['output']}: {values['kind']}, {size:,} entries{short}{again}"
    print(json.dumps(result) if values["json"] else said)
    return 0


def _texts(values: dict[str, Any]) -> Iterator[str]:
    """The texts of the corpus; a bad record is refused as in preprocessing."""
    from isotron.data.inputs import expand
    from isotron.data.parse import texts_of
    from isotron.data.records import read_batches

    done = 0
    for batch in read_batches(expand(values["input"]), columns=values["json_keys"]):
        for record in batch.records:
            if values["max_documents"] and done >= values["max_documents"]:
                return
            done += 1
            yield from texts_of(batch.path, record, tuple(values["json_keys"]))


def _inspect(words: Sequence[str]) -> int:
    values, problems = _read(words, LOOK)
    if problems:
        raise Refused(problems)
    from isotron.tokenizers.build import build_tokenizer
    from isotron.tokenizers.config import TokenizerConfig

    config = TokenizerConfig(**{n: values[n] for n in TokenizerConfig.__dataclass_fields__})
    tokenizer = build_tokenizer(config, values["vocab_size"])
    about = tokenizer.describe()
    shown = [{"text": t, "ids": tokenizer.encode(t)} for t in values["text"]]
    for one in shown:
        one["tokens"] = [tokenizer.decode([i]) for i in one["ids"]]
        one["comes_back"] = tokenizer.decode(one["ids"]) == one["text"]
    if values["json"]:
        print(json.dumps({**about, "notes": tokenizer.notes, "texts": shown}))
        return 0
    print(f"{about['type']}, {about['vocab_size']:,} entries; {', '.join(about['files'].values()) or 'no files'}")
    roles = ("eod", "bos", "eos", "pad", "unk", "sep", "cls", "mask")
    print("  " + ", ".join(f"{r} {about[r]} {tokenizer.decode([about[r]])!r}" for r in roles if about[r] is not None))
    if about["extra_ids"]:
        print(f"  {len(about['extra_ids'])} extra ids: {about['extra_ids'][0]} to {about['extra_ids'][-1]}")
    for line in tokenizer.notes:
        print(f"  {line}")
    for one in shown:
        back = "" if one["comes_back"] else ", does not come back as it was"
        print(f"  {one['text']!r}: {len(one['ids'])} tokens{back}")
        print("    " + " ".join(f"{i}:{t!r}" for i, t in zip(one["ids"], one["tokens"], strict=True)))
    return 0


_ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {"train": _train, "inspect": _inspect}


def help_text() -> str:
    """The options of both actions."""
    usage = "isotron tokenizer train --input FILES --output DIR [OPTIONS] | isotron tokenizer inspect TOKENIZER OPTIONS"
    return options_help(usage, {"[train]": TRAIN.values(), "[inspect]": LOOK.values()})
