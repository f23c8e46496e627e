"""`isotron compare`: two models on the same tokens; where they part, and by how much."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from isotron.commands.helptext import options_help
from isotron.commands.run_options import JSON
from isotron.config.argv import parse
from isotron.config.catalogue import Option
from isotron.core.errors import Problem, Refused, refuse

OWN = {
    "text": Option("text", "strs", (), "what both models read; without it, made-up tokens"),
    "tokens": Option("tokens", "int", 64, "how many made-up tokens", unit="tokens"),
    "dtype": Option("dtype", "str", "float32", "of the computation", choices=("float64", "float32", "bfloat16")),
    "tolerance": Option("tolerance", "float", 1e-5, "largest difference, relative to the largest value"),
    **JSON,
}
THEIRS = "transformers"


def run(words: Sequence[str]) -> int:
    """Compare as the words say; 0 when every activation is close, 1 when one is not."""
    places = list(words[: next((i for i, w in enumerate(words) if w.startswith("--")), len(words))])
    parsed = parse(words[len(places) :], OWN)
    values = {n: o.default for n, o in OWN.items()} | {k: g.value for k, g in parsed.given.items()}
    problems = list(parsed.problems)
    if len(places) != 2:
        case = "it takes two models: runs, steps, Hugging Face directories, or transformers as the second"
        problems.append(Problem("compare " + " ".join(places), case, "isotron compare my_model transformers"))
    if values["tokens"] < 2:
        problems.append(Problem(f"--tokens {values['tokens']}", "tokens must be 2 or more", "--tokens 64"))
    if problems:
        raise Refused(problems)
    rows = _rows(places[0], places[1], values)
    if values["json"]:
        print(json.dumps({"a": places[0], "b": places[1], "rows": list(map(_facts, rows))}))
    else:
        print("\n".join(_lines(rows)))
    return 0 if all(row.close for row in rows) else 1


def _rows(first: str, second: str, values: Mapping[str, Any]) -> list[Any]:
    import torch

    from isotron.hub import compare

    tokens, dtype = _tokens(first, values), getattr(torch, values["dtype"])
    a = compare.our_activations(first, tokens, dtype)
    theirs = second == THEIRS
    b = (compare.their_activations if theirs else compare.our_activations)(first if theirs else second, tokens, dtype)
    return compare.differences(a, b, values["tolerance"])


def _tokens(path: str, values: Mapping[str, Any]) -> Any:
    """[1, S]: the text under the first model's tokenizer, or numbers that walk through its vocabulary."""
    import torch

    from isotron.hub.locate import local_path
    from isotron.hub.opened import open_model
    from isotron.tokenizers.build import build_tokenizer
    from isotron.tokenizers.config import TokenizerConfig

    opened = open_model(local_path(path))
    if not values["text"]:
        count = min(values["tokens"], opened.model.max_position_embeddings or values["tokens"])
        return (torch.arange(count)[None] * 7919 + 13) % opened.model.vocab_size
    stored = opened.path / "tokenizer"
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=str(stored if stored.is_dir() else opened.path)))
    ids = tokenizer.encode(" ".join(values["text"]))
    if not ids:
        raise refuse(f"--text {' '.join(values['text'])}", "it has no tokens", '--text "Once upon a time"')
    return torch.tensor([ids])


def _facts(row: Any) -> dict[str, Any]:
    """A row for JSON, which has no numbers that are not finite."""
    from isotron.evaluate.result import finite

    return {k: finite(v) if isinstance(v, float) else v for k, v in asdict(row).items()}


def _lines(rows: Sequence[Any]) -> list[str]:
    lines = [f"{'':<14}{'difference':>12}{'of':>12}{'relative':>12}"]
    for row in rows:
        share = row.difference / row.largest if row.largest else float(row.difference != 0)
        mark = "" if row.close else "  differs"
        lines.append(f"{row.what:<14}{row.difference:>12.3e}{row.largest:>12.3e}{share:>12.1e}{mark}")
    first = next((row for row in rows if not row.close), None)
    if first is None:
        return [*lines, "", "both compute the same"]
    return [*lines, "", f"they part at: {first.what}, by {first.difference:.3e} of {first.largest:.3e}"]


def help_text() -> str:
    """The options of compare."""
    usage = (
        "isotron compare A B\n\nA: a run, a step, a Hugging Face directory or a Megatron checkpoint. B: another one,\n"
    )
    usage += "or transformers. Both run on the CPU of one process, one after the other."
    return options_help(usage, {"[command]": OWN.values()})
