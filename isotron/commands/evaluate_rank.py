"""One rank of `isotron evaluate`: a model from a checkpoint, tasks on it, results printed by rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isotron.config.schema import RunConfig
from isotron.core.checkpoint.format import read_manifest
from isotron.core.parallel.model import ParallelModel
from isotron.evaluate.examples import write_examples
from isotron.evaluate.harness import harness
from isotron.evaluate.model import ModelScorer
from isotron.evaluate.options import Asked
from isotron.evaluate.result import Result, table
from isotron.evaluate.tasks import HARNESS, evaluate
from isotron.hub.folder import end_tokens
from isotron.hub.foreign import is_foreign
from isotron.hub.opened import ORIGIN
from isotron.inference.config import Ending, Sampling, Wish
from isotron.inference.engine import Engine
from isotron.inference.generate import (
    continuation,
    find_tokenizer,
    foreign_tokenizer,
    loaded_model,
    with_sizes,
)
from isotron.inference.session import Session, session
from isotron.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model in a layout with its tokenizer. `begin`: what its own library puts before every text."""

    model: ParallelModel
    tokenizer: Tokenizer
    step: Path
    begin: tuple[int, ...]

    @property
    def origin(self) -> Path:
        """The directory of the files that the model came with."""
        return self.step if is_foreign(self.step) else self.step / ORIGIN


def main(config: RunConfig, options: Mapping[str, Any]) -> int:
    """Run the tasks and print them on rank 0; returns the exit code."""
    with session(config, replicas=True) as rank:
        loaded = load(rank)
        if options["examples_to"]:
            return _write(loaded, rank.config, options, rank.speaks)
        results = [r for name, path in options["task"] for r in run_task(loaded, rank.config, options, name, path)]
        if rank.speaks:
            print(_as_json(loaded.step, results) if options["json"] else table(results), flush=True)
        return 0


def load(rank: Session) -> Loaded:
    """The model that a session reads, with its tokenizer."""
    config, step = rank.config, rank.step
    foreign = is_foreign(step)
    tokenizer = foreign_tokenizer(config) if foreign else find_tokenizer(config, step, read_manifest(step))
    model = loaded_model(with_sizes(config, tokenizer), step, rank.mesh, rank.device)
    from_library = (step if foreign else step / ORIGIN).is_dir()
    return Loaded(model, tokenizer, step, tuple(tokenizer.prefix) if from_library else ())


def run_task(loaded: Loaded, config: RunConfig, options: Mapping[str, Any], name: str, path: str) -> list[Result]:
    """One task; several results where the harness has a group of them."""
    scorer = ModelScorer(loaded.model, options["rows"])
    how = asked(loaded, config, options, name, path)
    if name == HARNESS:
        return harness(how, scorer, partial(continued, loaded, how.width), options["harness_path"])
    return [evaluate(how, scorer)]


def asked(loaded: Loaded, config: RunConfig, options: Mapping[str, Any], name: str, path: str) -> Asked:
    """A task with the options of the command."""
    return Asked(
        name, path, loaded.tokenizer, loaded.begin, config.data.seq_length,
        options["overlapping_eval"], options["strict_lambada"], options["limit"], options["json_keys"][0],
    )  # fmt: skip


def _write(loaded: Loaded, config: RunConfig, options: Mapping[str, Any], speaks: bool) -> int:
    """Examples to train on, by one rank."""
    ((name, path),) = options["task"]
    if speaks:
        prefix = options["examples_to"]
        count = write_examples(asked(loaded, config, options, name, path), prefix)
        found = {"examples": count, "prefix": prefix}
        print(
            json.dumps(found) if options["json"] else f"{count:,} examples of {name} -> {prefix}.bin/.idx", flush=True
        )
    return 0


def continued(loaded: Loaded, width: int, wishes: Sequence[tuple[str, tuple[str, ...], int, float]]) -> list[str]:
    """Continuations of prompts, which lose their beginning where they and the new tokens are too long."""
    engine = Engine(loaded.model, loaded.tokenizer)
    ends = engine.ends(end_tokens(loaded.origin))
    found = [""] * len(wishes)
    for options in dict.fromkeys(wish[1:] for wish in wishes):
        numbers = [i for i, wish in enumerate(wishes) if wish[1:] == options]
        stops, new = options[0], min(options[1], max(1, width - 1))
        encoded = (loaded.tokenizer.encode(wishes[i][0]) for i in numbers)
        prompts = [[*loaded.begin, *tokens][-max(1, width - new) :] for tokens in encoded]
        rows = engine.answer(prompts, Wish(Sampling(options[2]), Ending(new, ends, stops), logprobs=False))
        for i, tokens, (row,) in zip(numbers, prompts, rows, strict=True):
            ended = row.reason == "stop" and bool(row.new) and row.new[-1] in ends
            text = continuation(loaded.tokenizer, tokens, row.new[:-1] if ended else row.new)
            found[i] = row.text.whole if row.text is not None else text
    return found


def _as_json(step: Path, results: list[Result]) -> str:
    return json.dumps({"checkpoint": str(step), "results": [r.as_json() for r in results]}, ensure_ascii=False)
