"""The optimizer's state in Megatron's `torch_dist` checkpoints: which of it is there, and where it stays behind. PURE.

Tensors of Adam are stored like the weights, under names that begin with what they are; the distributed optimizer's
default (`dp_reshardable`) keeps flat buckets instead, whose cuts follow the layout and are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# kind here -> how their names begin, in the order of preference
KINDS = {
    "master": ("optimizer.state.fp32_param.", "optimizer.state.param."),
    "exp_avg": ("optimizer.state.exp_avg.",),
    "exp_avg_sq": ("optimizer.state.exp_avg_sq.",),
}
_AGAIN = "save it again with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
_REASONS = {
    "buckets": f"it is kept in flat buckets of data-parallel ranks; {_AGAIN}",
    "ranks": f"legacy files keep it rank by rank; {_AGAIN}",
}


def kind_of(names: Iterable[str]) -> str:
    """How a `torch_dist` checkpoint keeps the state: as "tensors", in "buckets", or not at all, which is ""."""
    found = ""
    for name in names:
        if name.startswith("optimizer.state."):
            return "tensors"
        found = "buckets" if name.startswith(("optimizer.distributed.", "chained_")) else found
    return found


def prefixes(names: Iterable[str]) -> dict[str, str]:
    """Kind of state -> how the names of its tensors begin, for the kinds that are there."""
    names = list(names)
    found = {}
    for kind, starts in KINDS.items():
        for start in reversed(starts):
            if any(name.startswith(start) for name in names):
                found[kind] = start
    return found


def why_not(kind: str, names: Iterable[str], args: Mapping[str, Any], dtype: str) -> str:
    """Why the state cannot be taken over; empty when it can."""
    if kind != "tensors":
        return _REASONS.get(kind, "there is none in it")
    method, found = args.get("optimizer") or "adam", prefixes(names)
    if method != "adam" or not {"exp_avg", "exp_avg_sq"} <= found.keys():
        return f"it is that of {method}, with {', '.join(found) or 'nothing'} for each weight; Adam's is read"
    if dtype not in ("float32", "float64") and "master" not in found:
        return f"weights of {dtype} have no float32 masters in it"
    return ""
