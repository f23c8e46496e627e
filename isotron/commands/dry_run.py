"""`isotron train --dry-run`: one rank of a run of any size, built and stepped without memory and without the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from isotron.commands.run_options import tokenizer_entries
from isotron.config.catalogue import Option
from isotron.config.check import check, finish
from isotron.config.load import read
from isotron.config.resume import find_checkpoint
from isotron.config.schema import RunConfig, changed
from isotron.core.errors import Refused, refuse
from isotron.core.optim.groups import Override, parse
from isotron.progress import ticking

OPTIONS = {
    "dry_run": Option(
        "dry_run", "bool", False, "build one rank without memory, take a step, and say what it keeps and sends"
    ),
    "dry_run_rank": Option(
        "dry_run_rank",
        "int",
        -1,
        "the rank of a dry run; -1 means rank 0, and one rank of each pipeline rank beside it",
    ),
    "dry_run_world": Option(
        "dry_run_world", "int", 0, "ranks of a dry run; 0 means those of the layout with dp 1 unless --dp is given"
    ),
}
# no data, tokenizer or checkpoint is read, and the devices need not be here
UNUSED = (
    *("data_path", "valid_data_path", "mock_data", "split", "train_iters", "device", "save", "load", "vocab_size"),
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "lr_warmup_iters", "lr_wsd_decay_iters"),
)
VOCABULARY = 50304


def is_meant(words: Sequence[str]) -> bool:
    """Whether a command asks for a dry run, by the flag itself or by one of its own options."""
    return any(word.strip().replace("_", "-").startswith("--dry-run") for word in words)


def run(words: Sequence[str], own: Mapping[str, Option]) -> int:
    """Dry-run what the words describe; returns the exit code."""
    loaded = read(words, None, own)
    place = loaded.config.checkpoint
    if place.load and not {"load", "save"} & loaded.doubtful:  # its configuration counts, its tensors are not read
        told = any(loaded.provenance.get(name, "default") != "default" for name in ("family", "num_layers"))
        loaded = read(words, _configuration(place.load, place.save, told), own)
    if loaded.problems:
        raise Refused(loaded.problems)
    flags: dict[str, Any] = {k: g.value for k, g in loaded.flags.items()}
    config = settled(loaded.config, flags.get("dry_run_world", 0))
    rank = flags.get("dry_run_rank", -1)
    if not -1 <= rank < config.layout.world:
        case = f"the layout has ranks 0 to {config.layout.world - 1}"
        raise refuse(f"--dry-run-rank {rank}", case, f"--dry-run-rank {config.layout.world - 1}")
    check_optimizer(config)
    from isotron.train.dryrun.rank import dry, passes
    from isotron.train.dryrun.report import facts, lines

    per_stage = config.layout.world // config.layout.pp
    others = [] if rank >= 0 else [per_stage * i for i in range(1, config.layout.pp)]
    with ticking("dry run", passes(config) * (1 + len(others))) as tick:
        detailed, *stages = (dry(config, r, tick) for r in (max(rank, 0), *others))
    found = facts(config, detailed, [] if rank >= 0 else [detailed, *stages])
    print(json.dumps(found, indent=1) if flags.get("json") else "\n".join(lines(found)))
    return 0


def _configuration(load: str, save: str, told: bool) -> Any:
    """What the checkpoint to load says of its model; a run whose model is `told` may be planned where it is not."""
    try:
        return find_checkpoint(load, save, log=_say).config
    except Refused:
        if not told:
            raise
        _say(f"--load {load} cannot be read here: the model is that of the other options")
        return None


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def check_optimizer(config: RunConfig) -> None:
    """Refuse rules that share out matrices with the ranks of a stage: these tell each other what they hold, and here is
    only one of them.
    """
    given = [o.says for o in map(parse, config.optim.param_groups) if isinstance(o, Override)]
    rules = {config.optim.optimizer, *(str(says["optimizer"]) for says in given if "optimizer" in says)}
    found = rules & {"muon", "adafactor"}
    if found and config.layout.world > config.layout.pp:
        rule = min(found)
        case = (
            "it deals whole matrices to the ranks of a stage, which say what they hold, and a dry run has one of them"
        )
        raise refuse(f"--dry-run --optimizer {rule}", case, "--optimizer adamw, or one process of each stage (--tp 1)")


def settled(config: RunConfig, world: int) -> RunConfig:
    """The finished config of a world of so many ranks, on no device; every problem of it is raised."""
    config = changed(config, device="cpu", load="")
    if not config.model.vocab_size:
        entries = tokenizer_entries(config)
        if not entries:
            print(f"note: no tokenizer is here; --vocab-size {VOCABULARY} is assumed", file=sys.stderr)
        config = changed(config, vocab_size=entries or VOCABULARY)
    problems = check(config, world or None, 0, config.model.vocab_size, UNUSED)
    if problems:
        raise Refused(problems)
    return finish(config, world or None, 0, config.model.vocab_size)
