"""Options of Megatron whose meaning depends on other options: sample counts, layers per chunk, query groups. PURE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isotron.config.argv import Given
from isotron.core.errors import Problem

Look = Callable[[str], Any]
_SAMPLES = {
    "@train_samples": "train_iters",
    "@lr_warmup_samples": "lr_warmup_iters",
    "@lr_decay_samples": "lr_decay_iters",
    "@lr_wsd_decay_samples": "lr_wsd_decay_iters",
}
_RANK_LAYERS = {"@first_rank_layers": "first_stage_layers", "@last_rank_layers": "last_stage_layers"}


@dataclass
class Settled:
    """Values found (leaf -> (value, origin)), lines to print, and problems."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def settle(flags: Mapping[str, Given], look: Look, toml: Mapping[str, Any]) -> Settled:
    """Resolve the leaves that begin with @; `look(leaf)` is the value that the other sources give."""
    out = Settled()
    for late, leaf in _SAMPLES.items():
        if _stands(flags, late, leaf):
            _samples(out, flags[late], leaf, look)
    if _stands(flags, "@layers_per_chunk", "vpp"):
        _chunks(out, flags["@layers_per_chunk"], look)
    for late, leaf in _RANK_LAYERS.items():
        if _stands(flags, late, leaf):
            _rank_layers(out, flags[late], leaf, look)
    if "@grouped" in flags:
        _grouped(out, flags, look)
    if "@train_data" in flags and "valid_data_path" not in flags and "valid_data_path" not in toml:
        source = flags["@train_data"].source
        out.values |= {"split": ("100,0,0", source), "eval_iters": (0, source)}
        out.notes.append(f"{source}: no --valid-data-path is given, so there is no evaluation")
    return out


def _stands(flags: Mapping[str, Given], late: str, leaf: str) -> bool:
    """Whether the late option was given and no later option of the command set the same leaf."""
    return late in flags and (leaf not in flags or flags[leaf].place < flags[late].place)


def _samples(out: Settled, given: Given, leaf: str, look: Look) -> None:
    batch = look("global_batch_size")
    flag = "--" + leaf.replace("_", "-")
    if not batch or batch < 0:
        case = "samples become steps by the global batch size, which is not given"
        out.problems.append(Problem(given.source, case, f"{flag} 1000, or add --global-batch-size 128"))
        return
    steps, rest = divmod(given.value, batch)
    arithmetic = f"{given.value} samples / {batch} samples per step = {steps} steps"
    # Megatron itself rounds the length of a run down; a rounded learning-rate schedule would have other rates.
    if steps == 0 or (rest and leaf != "train_iters"):
        near = f"{flag} {max(steps, 1)} (= {max(steps, 1) * batch} samples)"
        out.problems.append(
            Problem(f"{given.source} --global-batch-size {batch}", f"{arithmetic} and {rest} samples over", near)
        )
        return
    out.values[leaf] = (steps, given.source)
    out.notes.append(f"{given.source}: {arithmetic}" + (f", {rest} samples are left over" if rest else ""))


def _chunks(out: Settled, given: Given, look: Look) -> None:
    layers, pp, per_chunk = look("num_layers"), look("pp"), given.value
    if pp > 0 and layers % (pp * per_chunk) == 0 and layers:
        out.values["vpp"] = (layers // (pp * per_chunk), given.source)
        return
    works = [n for n in range(1, layers + 1) if pp > 0 and layers % (pp * n) == 0]
    fix = (
        f"--num-layers-per-virtual-pipeline-stage {min(works, key=lambda n: abs(n - per_chunk))}"
        if works
        else "--vpp 1"
    )
    case = f"{layers} layers / (pp {pp} x {per_chunk} layers) is not a whole number of chunks"
    out.problems.append(Problem(f"{given.source} --num-layers {layers} --pp {pp}", case, fix))


def _rank_layers(out: Settled, given: Given, leaf: str, look: Look) -> None:
    if look("vpp") == 1 and "vpp" not in out.values:
        out.values[leaf] = (given.value, given.source)
        return
    case = "it counts the layers of a rank, which holds several stages when vpp is above 1"
    out.problems.append(
        Problem(f"{given.source} with --vpp", case, "--layers-per-stage with one count per stage, or --vpp 1")
    )


def _grouped(out: Settled, flags: Mapping[str, Given], look: Look) -> None:
    if not look("num_key_value_heads"):
        # Megatron's default number of groups is 1 (multi-query attention): a surprise that nobody should get unasked
        case = "the number of key/value heads is not given"
        out.problems.append(Problem("--group-query-attention", case, "--group-query-attention --num-query-groups 8"))
