"""From words to a config: default < preset < checkpoint < TOML < flags, the last occurrence wins. PURE.

`read` collects every problem; `load` raises them all at once. Provenance says of each value where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isotron.config.argv import Given, Parsed, parse
from isotron.config.catalogue import Option, catalogue
from isotron.config.compat import ALIASES
from isotron.config.foreign import begun
from isotron.config.schema import MODELS, PRESETS, RunConfig, changed
from isotron.config.settle import settle
from isotron.config.switches import (
    MEGATRON_MODEL,
    MEGATRON_OF_FAMILY,
    MEGATRON_RUN,
    MEGATRON_TRAIN_ITERS,
    Family,
    choose_family,
)
from isotron.config.tables import CHOOSERS, read_tables, read_toml
from isotron.core.errors import Problem, Refused

# What a resumed run takes from its checkpoint: what decides the numbers, not where and on what it runs.
RESUMED = ("model", "data", "tokenizer", "optim", "schedule", "train")
NOT_RESUMED = ("device",)
# What the weights of a checkpoint fix: the option, and the property that says its value with defaults filled in.
SHAPES = {
    "num_layers": "num_layers",
    "encoder_num_layers": "encoder_num_layers",
    "decoder_num_layers": "decoder_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "ffn_hidden_size": "ffn",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_embeddings",
    "type_vocab_size": "type_vocab_size",
    "norm_placement": "norm_placement",
}

# What an option of other families is in one, as in Megatron.
OF_FAMILY = {("t5", "num_layers"): "encoder_num_layers"}

LOADER_OPTIONS = {
    "config": Option("config", "str", "", "TOML file with any of the sections below; flags override it"),
    "print_config": Option("print_config", "bool", False, "show every value and where it came from, and stop"),
    "defaults": Option(
        "defaults", "str", "isotron", "whose defaults fill what is left out", choices=("isotron", "megatron")
    ),
    **CHOOSERS,
}


@dataclass(frozen=True)
class Loaded:
    """A config as far as it could be read, the origin of each leaf, lines to print, and all problems.

    `doubtful` are leaves whose given value was not understood: rules about them would only repeat a problem.
    """

    config: RunConfig
    provenance: dict[str, str]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    doubtful: frozenset[str]
    flags: dict[str, Given]


def options(extra: Mapping[str, Option] | None = None) -> dict[str, Option]:
    """Every option of a command that takes a run's config, with the command's own."""
    return {**LOADER_OPTIONS, **catalogue(), **(extra or {})}


def load(
    argv: Sequence[str], checkpoint: Mapping[str, Any] | None = None
) -> tuple[RunConfig, dict[str, str], tuple[str, ...]]:
    """(config, leaf -> origin, notes) of a command line without its verb; every problem is raised together.

    `checkpoint` is the `to_dict` of the run that is resumed.
    """
    loaded = read(argv, checkpoint)
    if loaded.problems:
        raise Refused(loaded.problems)
    return loaded.config, loaded.provenance, loaded.notes


def read(
    argv: Sequence[str], checkpoint: Mapping[str, Any] | None = None, extra: Mapping[str, Option] | None = None
) -> Loaded:
    """Like `load`, with the problems in the result; `extra` are options that only this command has."""
    parsed = parse(argv, options(extra))
    toml, where = _read_config(parsed)
    saved, saved_family = _read_checkpoint(checkpoint, parsed)
    megatron = "defaults" in parsed.given and parsed.given["defaults"].value == "megatron"
    family, problems = choose_family(parsed.given, toml, saved_family, megatron)
    parsed.problems += problems
    merged = _merge(parsed, toml, where, saved, family, megatron)
    settled = settle(parsed.given, lambda leaf: merged[leaf][0] if leaf in merged else 0, toml)
    merged |= {leaf: (value, f"flag {origin}") for leaf, (value, origin) in settled.values.items()}
    parsed.problems += settled.problems
    parsed.notes += settled.notes
    config = _build(merged, family, parsed)
    if saved:
        _compare_model(config, saved, saved_family, parsed, merged)
        _say_decay(config, saved, parsed)
    origins = {leaf: origin for leaf, (_, origin) in merged.items()} | {"family": family.origin}
    _say_defaults(parsed, merged, family, megatron)
    return Loaded(
        config, origins, tuple(parsed.notes), tuple(parsed.problems), frozenset(parsed.doubtful), parsed.given
    )


def _read_config(parsed: Parsed) -> tuple[dict[str, Any], str]:
    if "config" not in parsed.given:
        return {}, ""
    path = parsed.given["config"].value
    try:
        leaves, problems = read_toml(path)
    except Refused as refused:  # what follows without the file would not be the user's problems
        raise Refused([*parsed.problems, *refused.problems]) from refused
    parsed.problems += problems
    return leaves, path


def _read_checkpoint(checkpoint: Mapping[str, Any] | None, parsed: Parsed) -> tuple[dict[str, Any], str]:
    if not checkpoint:
        return {}, ""
    if "finetune" in parsed.given and parsed.given["finetune"].value:
        checkpoint = begun(checkpoint)
    tree = {section: table for section, table in checkpoint.items() if section in RESUMED}
    leaves, family, problems = read_tables(tree, "checkpoint")
    parsed.problems += problems
    if leaves.get("lr_decay_iters") == leaves.get("train_iters"):
        leaves.pop("lr_decay_iters", None)  # it followed the length of the run, and follows that of the continued one
    return {k: v for k, v in leaves.items() if k not in NOT_RESUMED and k not in CHOOSERS}, family


def _merge(
    parsed: Parsed, toml: Mapping[str, Any], where: str, saved: Mapping[str, Any], family: Family, megatron: bool
) -> dict[str, tuple[Any, str]]:
    """Leaf -> (value, origin), each source over the one before."""
    merged = {o.name: (o.default, "default") for o in catalogue().values()}
    model = MODELS[family.name]()
    merged |= {leaf: (getattr(model, leaf), "default") for leaf in model.__dataclass_fields__}
    if family.megatron or megatron:
        merged |= {leaf: (value, "Megatron's default") for leaf, value in MEGATRON_MODEL.items()}
    if megatron:
        own = {**MEGATRON_RUN, **MEGATRON_OF_FAMILY.get(family.name, {})}
        merged |= {leaf: (value, "Megatron's default") for leaf, value in own.items()}
        merged["train_iters"] = (MEGATRON_TRAIN_ITERS, "--defaults megatron")
    preset = parsed.given["preset"].value if "preset" in parsed.given else toml.get("preset")
    if preset:
        sizes = PRESETS[preset]
        merged |= {leaf: (getattr(sizes, leaf), f"preset {preset}") for leaf in sizes.__dataclass_fields__}
    replaced = _other_tokenizer({g.leaf for g in parsed.given.values()} | toml.keys())
    merged |= {leaf: (value, "checkpoint") for leaf, value in saved.items() if leaf not in replaced}
    for leaf in catalogue():
        if leaf in toml:
            _set(merged, OF_FAMILY.get((family.name, leaf), leaf), toml[leaf], where)
    for given in sorted(parsed.given.values(), key=lambda g: g.place):
        if given.leaf in catalogue():
            _set(merged, OF_FAMILY.get((family.name, given.leaf), given.leaf), given.value, f"flag {given.source}")
    return merged


def _other_tokenizer(given: set[str]) -> set[str]:
    """Files of a checkpoint's tokenizer that those of another kind stand for."""
    pair = {"vocab_file", "merge_file"}
    return (pair if "tokenizer_model" in given else set()) | ({"tokenizer_model"} if given & pair else set())


def _set(merged: dict[str, tuple[Any, str]], leaf: str, value: Any, origin: str) -> None:
    merged[leaf] = (value, origin)
    if leaf == "lr_warmup_fraction" and value:  # two spellings of one quantity: the one given last stands
        merged["lr_warmup_iters"] = (0, origin)


def _build(merged: dict[str, tuple[Any, str]], family: Family, parsed: Parsed) -> RunConfig:
    """The config of the merged values; leaves that the family lacks are problems when somebody gave them."""
    config = replace(RunConfig(), model=MODELS[family.name]())
    for option in catalogue().values():
        value, origin = merged[option.name]
        if not option.families or family.name in option.families:
            config = changed(config, **{option.name: value})
            continue
        del merged[option.name]
        if origin not in ("default", "Megatron's default", "checkpoint") and not _harmless(option.name, value, merged):
            parsed.problems.append(_not_in_family(option, origin, family))
    return config


def _harmless(leaf: str, value: Any, merged: Mapping[str, tuple[Any, str]]) -> bool:
    """Whether an option that GPT lacks asks for exactly what GPT does anyway."""
    heads = merged["num_attention_heads"][0]
    if leaf == "num_key_value_heads":
        return bool(value == heads)
    return leaf == "head_dim" and bool(value * heads == merged["hidden_size"][0])


def _not_in_family(option: Option, origin: str, family: Family) -> Problem:
    asked = f"{origin.removeprefix('flag ')} with family {family.name} ({family.origin})"
    if origin.endswith(".toml"):
        asked = f"model.{option.name} in {origin} with family {family.name} ({family.origin})"
    one = len(option.families) == 1
    having = f"family {option.families[0]} has" if one else f"families {', '.join(option.families)} have"
    case = f"only {having} {option.name}"
    return Problem(asked, case, f"--family {option.families[0]}, or leave it out")


def _compare_model(
    config: RunConfig, saved: Mapping[str, Any], family: str, parsed: Parsed, merged: Mapping[str, tuple[Any, str]]
) -> None:
    """A checkpoint's weights fix the sizes; what else is given anew changes the model's function and is said."""
    if family != config.model.family:
        return
    fields = MODELS[family].__dataclass_fields__
    old = MODELS[family](**{k: v for k, v in saved.items() if k in fields})
    for leaf, name in SHAPES.items():
        if not hasattr(old, name):
            continue
        was, now = getattr(old, name), getattr(config.model, name)
        origin = merged[leaf][1] if leaf in merged else "default"
        if was != now and origin not in ("default", "checkpoint"):  # else it follows from an option that is reported
            given = origin.removeprefix("flag ") if origin.startswith("flag ") else f"{leaf} {now} ({origin})"
            fix = f"--{leaf.replace('_', '-')} {str(was).lower()} as in the checkpoint, or leave it out"
            parsed.problems.append(Problem(f"--load with {given}", f"the checkpoint's {leaf} is {was}", fix))
            parsed.doubtful.add(leaf)
    for leaf in fields:
        was, now = getattr(old, leaf), getattr(config.model, leaf)
        if was != now and leaf not in SHAPES:
            parsed.notes.append(f"{leaf} is {now} ({merged[leaf][1]}), the checkpoint was trained with {was}")


def _say_decay(config: RunConfig, saved: Mapping[str, Any], parsed: Parsed) -> None:
    if "train_iters" not in saved:
        return
    was, now = saved["train_iters"], config.train.train_iters
    given = config.schedule
    what = {
        "the learning rate": given.lr_decay_style != "constant",
        "its warm-up (a fraction of that)": given.lr_warmup_fraction > 0 and not given.lr_warmup_iters,
        "weight decay": given.weight_decay_incr_style != "constant",
    }
    follows = ", ".join(name for name, on in what.items() if on)
    if was != now and not given.lr_decay_iters and "lr_decay_iters" not in saved and follows:
        keep = f"--lr-decay-iters {was} keeps it as it was, {now} from the start is what one run of this length has"
        parsed.notes.append(f"over train_iters {now} instead of {was} from now on: {follows}; {keep}")


def _say_defaults(parsed: Parsed, merged: Mapping[str, tuple[Any, str]], family: Family, megatron: bool) -> None:
    if not (megatron or family.megatron):
        if family.origin == "default" and any(g.source.split()[0] in ALIASES for g in parsed.given.values()):
            parsed.notes.append(
                f"model family {family.name} (default); for Megatron's GPT add --defaults megatron or --family gpt"
            )
        return
    origins = ("Megatron's default", "--defaults megatron")
    names = [f"{leaf} {value}" for leaf, (value, origin) in merged.items() if origin in origins]
    if merged["lr"][1] == "default":
        names.append(f"lr {merged['lr'][0]} (isotron's default, Megatron has none)")
    parsed.notes.append(
        f"model family {family.name} ({family.origin}); left to --defaults megatron: {', '.join(names) or 'nothing'}"
    )
