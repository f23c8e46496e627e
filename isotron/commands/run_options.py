"""From the words of a command to a checked run config: what `train` and `verify` have in common."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isotron.commands.helptext import options_help
from isotron.config.catalogue import Option, catalogue
from isotron.config.check import check, finish
from isotron.config.load import LOADER_OPTIONS, RESUMED, Loaded, read
from isotron.config.resume import Found, find_checkpoint
from isotron.config.rules_run import own_copy
from isotron.config.schema import SECTIONS, RunConfig, changed, to_dict, to_toml
from isotron.core.checkpoint.remote import is_remote
from isotron.core.errors import Problem, Refused
from isotron.planner.budget import within_budget
from isotron.tokenizers.config import DESCRIPTOR

JSON = {"json": Option("json", "bool", False, "print the result as JSON")}


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its finished config, where values came from, lines to print, the checkpoint to resume.

    `sought`: lines about how it was found, where the ranks look again and say so themselves.
    """

    config: RunConfig
    provenance: Mapping[str, str]
    notes: tuple[str, ...]
    flags: Mapping[str, Any]
    resumed: Found
    sought: tuple[str, ...] = ()


def prepare(words: Sequence[str], extra: Mapping[str, Option], skip: Collection[str] = ()) -> Prepared:
    """Read and check a run's command; every problem is raised at once. `skip`: leaves that the verb does not need."""
    from isotron.launch import from_environment

    said: list[str] = []
    problems: list[Problem] = []
    loaded = read(words, None, extra)
    found = Found()
    if not {"load", "save"} & loaded.doubtful and "load" not in skip:
        found = _caught(problems, Found(), lambda: _find(loaded, said.append))
        if found.config is not None:
            loaded = read(words, found.config, extra)
    # the run is named, not the step: should the step prove damaged, the loader looks for the one before it
    # (what lies in the cache of the hub has another path than its name)
    place = {"load": found.path} if found.weights_only and found.config is not None and not found.step else {}
    if found.path and is_remote(loaded.config.checkpoint.load):
        place = {"load": found.path}
    if not found.path and not _may_be_near(loaded):
        place = {"load": ""}
    config = changed(loaded.config, **place)
    unread = _unread(loaded) if problems else set()
    copy = _own_tokenizer(config, found)
    vocab = 0
    if not {"tokenizer_model", "vocab_file", "merge_file", "tokenizer_type"} & set(skip):
        try:
            vocab = tokenizer_entries(config)
        except Refused as refused:  # what lies there now cannot be read
            problems += [replace(problem, fix=own_copy(copy) if copy else problem.fix) for problem in refused.problems]
    world = from_environment()
    size = None if world is None else world.size
    devices = device_count(config.train.device)
    problems = [*loaded.problems, *problems]
    problems += check(config, size, devices, vocab, {*skip, *loaded.doubtful, *unread}, copy)
    if problems:
        raise Refused(problems)
    finished, chosen = within_budget(finish(config, size, devices, vocab))
    again = bool(found.path) and not place
    notes = (*loaded.notes, *(() if again else said), *_changes(config, finished), *chosen)
    origins = {**loaded.provenance, **_derived(config, finished)}
    if loaded.config.checkpoint.load and not found.path and not _may_be_near(loaded):
        origins["load"] = f"{origins['load']}, which holds no checkpoint yet"
    flags = {k: g.value for k, g in loaded.flags.items()}
    return Prepared(finished, origins, notes, flags, found, tuple(said) if again else ())


def _own_tokenizer(config: RunConfig, found: Found) -> str:
    """The copy of a tokenizer in a checkpoint whose vocabulary the model has, where another one is given."""
    place = os.path.join(found.path, "tokenizer")
    given, stored = config.tokenizer.tokenizer_model, (found.config or {}).get("model", {})
    if not os.path.exists(os.path.join(place, DESCRIPTOR)) or (
        given and os.path.realpath(given) == os.path.realpath(place)
    ):
        return ""
    return place if stored.get("vocab_size") == config.model.vocab_size else ""


def _places(loaded: Loaded) -> tuple[str, str]:
    return loaded.config.checkpoint.load, loaded.config.checkpoint.save


def _may_be_near(loaded: Loaded) -> bool:
    """Whether the nodes' own directories may have steps of the run that is to go on."""
    (load, save), near = _places(loaded), loaded.config.checkpoint.local_save
    return bool(near and load and save) and os.path.realpath(load) == os.path.realpath(save)


def _find(loaded: Loaded, say: Callable[[str], None]) -> Found:
    """The checkpoint that `--load` names; where it has none that is whole and the nodes may, the ranks will see."""
    if not _may_be_near(loaded):
        return find_checkpoint(*_places(loaded), log=say)
    try:
        found = find_checkpoint(*_places(loaded), log=lambda text: None)
    except Refused:
        found = Found()
    if not found.path:
        load, near = loaded.config.checkpoint.load, loaded.config.checkpoint.local_save
        say(f"no whole checkpoint in {load}: the run goes on from one in {near}, or begins where there is none")
    return found


def _unread(loaded: Loaded) -> set[str]:
    """Leaves that a checkpoint would have given, had it been found: what they lack is no problem of the command."""
    return {n for n, o in catalogue().items() if o.section in RESUMED and loaded.provenance.get(n) == "default"}


def _caught(problems: list[Problem], default: Any, action: Callable[[], Any]) -> Any:
    """The action's result; when it refuses, its problems join the others and `default` is the result."""
    try:
        return action()
    except Refused as refused:
        problems += refused.problems
        return default


def device_count(name: str) -> int:
    """Accelerators that this command may use; torch is only loaded to ask when it may use any."""
    if name == "cpu":
        return 0
    from isotron.core import device

    return device.count() if device.is_cuda(device.resolve("auto")) else 0


def tokenizer_entries(config: RunConfig) -> int:
    """Entries of the tokenizer; 0 when no file is given, or one is missing (which a rule reports)."""
    from pathlib import Path

    t = config.tokenizer
    files = [f for f in (t.tokenizer_model, t.vocab_file, t.merge_file) if f]
    if not files or not all(Path(f).exists() for f in files) or (t.merge_file and not t.vocab_file):
        return 0
    if t.vocab_file and not t.merge_file and not t.vocab_file.endswith(".txt"):  # half of a byte-level BPE
        return 0
    from isotron.tokenizers.build import build_tokenizer

    return build_tokenizer(t).vocab_size


def _changes(before: RunConfig, after: RunConfig) -> list[str]:
    """What `finish` decided against an option that was given."""
    if before.layout.sequence_parallel and not after.layout.sequence_parallel:
        return ["--sequence-parallel: no effect with --tp 1, there is nothing to split the sequence over"]
    return []


def _derived(before: RunConfig, after: RunConfig) -> dict[str, str]:
    old, new = to_dict(before), to_dict(after)
    return {k: "derived" for section in new for k in new[section] if old[section][k] != new[section][k]}


def show_config(prepared: Prepared, as_json: bool) -> str:
    """`--print-config`: every value and where it came from."""
    if not as_json:
        return to_toml(prepared.config, prepared.provenance)
    tree = to_dict(prepared.config)
    return json.dumps({"config": tree, "provenance": dict(prepared.provenance), "notes": prepared.notes}, indent=2)


def _is_rare(option: Option) -> bool:
    """Whether an option stands behind the everyday ones of its section: how rotary positions are stretched."""
    return option.name.startswith("rope_") and option.name != "rope_theta"


def run_help(usage: str, extra: Mapping[str, Option], closing: str = "") -> str:
    """The options of a run by section, the command's own first."""
    own = {k: o for k, o in LOADER_OPTIONS.items() if not o.section}
    groups = {"[command]": [*own.values(), *extra.values()]}
    for section in SECTIONS:
        chosen = [o for o in LOADER_OPTIONS.values() if o.section == section]
        own_options = (o for o in catalogue().values() if o.section == section)
        groups[f"[{section}]"] = [*chosen, *sorted(own_options, key=_is_rare)]
    return options_help(usage, groups, closing)
