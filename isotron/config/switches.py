"""Which model family a run has: named, read from a checkpoint, or told by Megatron's architecture switches. PURE.

Megatron composes a model from switches; isotron has one file per family. A combination that is exactly a family becomes
that family; any other is refused with the switches that are missing or too many for the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isotron.config.argv import Given
from isotron.config.schema import DEFAULT_FAMILY, MODELS, PRESETS
from isotron.core.errors import Problem

# feature -> what each family has; Megatron's defaults are the GPT column, and BERT's.
_SWITCHES: dict[str, tuple[str, str, str]] = {  # as in gpt, in families built like llama, in neox
    "@positions": ("learned_absolute", "rope", "rope"),
    "@norm": ("LayerNorm", "RMSNorm", "LayerNorm"),
    "@mlp": ("gelu", "swiglu", "gelu"),
    "@bias": ("on", "off", "on"),
}
FEATURES: dict[str, dict[str, str]] = {
    switch: {**dict.fromkeys(MODELS, llama), "gpt": gpt, "bert": gpt, "neox": neox}
    for switch, (gpt, llama, neox) in _SWITCHES.items()
}
FEATURES["@mlp"] |= {"gemma2": "geglu", "gemma3": "geglu", "t5": "relu"}
FEATURES["@positions"]["t5"] = "relative"
SPELLING: dict[tuple[str, str], str] = {
    ("@positions", "learned_absolute"): "--position-embedding-type learned_absolute",
    ("@positions", "rope"): "--position-embedding-type rope",
    ("@positions", "relative"): "--position-embedding-type relative",
    ("@norm", "LayerNorm"): "--normalization LayerNorm",
    ("@norm", "RMSNorm"): "--normalization RMSNorm",
    ("@mlp", "swiglu"): "--swiglu",
    ("@bias", "off"): "--disable-bias-linear",
}
# Megatron has no default length of a run; its launch lines often leave it out.
MEGATRON_TRAIN_ITERS = 500000
# What Megatron uses where a command is silent and isotron's own default differs.
MEGATRON_MODEL: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "tie_embeddings": True}
MEGATRON_RUN: dict[str, Any] = {
    "adam_beta2": 0.999,
    "weight_decay": 0.01,
    "lr_decay_style": "linear",
}
# The same of one family.
MEGATRON_OF_FAMILY: dict[str, dict[str, Any]] = {
    "bert": {"norm_placement": "pre", "norm_epsilon": 1e-5, "short_seq_prob": 0.1},
}


@dataclass(frozen=True)
class Family:
    """The family of a run, where it was said, and whether it was told by Megatron's switches or defaults."""

    name: str
    origin: str
    megatron: bool = False


def choose_family(
    flags: Mapping[str, Given], toml: Mapping[str, Any], checkpoint: str, megatron: bool
) -> tuple[Family, list[Problem]]:
    """The family by the strongest source that names one, and what contradicts it."""
    problems: list[Problem] = []
    named = _named(flags, toml, checkpoint, problems)
    switches = {k: g for k, g in flags.items() if k in FEATURES}
    if named:
        family = Family(*named)
        problems += [_against(g, family) for k, g in switches.items() if FEATURES[k][family.name] != g.value]
        return family, problems
    if switches:
        found = _from_switches(switches, problems)
        experts = found.name == "llama" and "num_experts" in flags
        return Family("mixtral" if experts else found.name, found.origin, True), problems
    if "num_experts" in flags:
        return Family("mixtral", flags["num_experts"].source, megatron), problems
    if megatron:
        return Family("gpt", "Megatron's default", True), problems
    return Family(DEFAULT_FAMILY, "default"), problems


def _named(
    flags: Mapping[str, Given], toml: Mapping[str, Any], checkpoint: str, problems: list[Problem]
) -> tuple[str, str] | None:
    """(family, origin); a later source that names another family than an earlier one is a problem."""
    found: list[tuple[str, str]] = []
    if checkpoint:
        found.append((checkpoint, "the checkpoint"))
    preset = flags["preset"].value if "preset" in flags else toml.get("preset")
    if preset:
        found.append((PRESETS[preset].family, flags["preset"].source if "preset" in flags else f"preset {preset}"))
    if "family" in flags:
        found.append((flags["family"].value, flags["family"].source))
    elif "family" in toml:
        found.append((toml["family"], f"model.family {toml['family']}"))
    for family, origin in found[1:]:
        if family != found[0][0]:
            fix = f"--family {found[0][0]}, or leave out one of the two"
            problems.append(
                Problem(
                    f"{origin} with {found[0][1]}",
                    f"{found[0][1]} is of family {found[0][0]}, {origin} of {family}",
                    fix,
                )
            )
    return found[0] if found else None


def _against(given: Given, family: Family) -> Problem:
    has = FEATURES[given.leaf][family.name]
    other = next(name for name, value in FEATURES[given.leaf].items() if value == given.value)
    case = f"family {family.name} ({family.origin}) has {given.leaf[1:]} {has}"
    return Problem(f"{given.source} with family {family.name}", case, f"leave it out, or --family {other}")


def _from_switches(switches: Mapping[str, Given], problems: list[Problem]) -> Family:
    have = {k: switches[k].value if k in switches else FEATURES[k]["gpt"] for k in FEATURES}
    wrong = {family: [k for k in FEATURES if have[k] != FEATURES[k][family]] for family in ("llama", "gpt")}
    family = min(wrong, key=lambda f: len(wrong[f]))
    origin = " ".join(g.source for g in switches.values())
    if wrong[family]:
        problems.append(_mixture(family, wrong[family], have, origin))
    return Family(family, origin, True)


def _mixture(family: str, wrong: list[str], have: Mapping[str, str], origin: str) -> Problem:
    missing = [
        SPELLING[k, FEATURES[k][family]]
        for k in wrong
        if (k, FEATURES[k][family]) in SPELLING and have[k] == FEATURES[k]["gpt"]
    ]
    extra = [SPELLING[k, have[k]] for k in wrong if have[k] != FEATURES[k]["gpt"]]
    parts = [f"missing {', '.join(missing)}"] if missing else []
    parts += [f"too many {', '.join(extra)}"] if extra else []
    fix = f"add {' '.join(missing)}" if missing else f"leave out {', '.join(extra)}"
    case = f"these switches are no family of isotron; for the nearest, {family}: {'; '.join(parts)}"
    return Problem(origin, case, f"{fix}, or --family gpt or --family llama without any of these switches")
