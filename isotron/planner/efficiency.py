"""How much of the data sheet a software stack gets out of a device: the numbers that are fitted. PURE.

A `Stack` is a training framework at a time, with what it does by structure (fused attention or not, what it overlaps,
bytes of a gradient) and a few fitted fractions. The fractions come from `calibrate.py` and stand in
`data/efficiency.json`, by stack, device and number format; none of them belongs to a single run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from isotron.core.errors import refuse


@dataclass(frozen=True)
class Fractions:
    """Fitted numbers; each has a meaning and a range that is physically possible."""

    matmul: float = 0.75  # of the peak, in large matrix products
    small: float = 200.0  # elements: a product takes longer by this over each of its sides
    attention: float = 0.6  # of the matmul rate, in the attention core
    experts: float = 0.6  # of the matmul rate, in the grouped products of experts
    memory: float = 0.7  # of the memory bandwidth, in everything that is not a product
    links: float = 0.7  # of the links inside a node
    network: float = 0.7  # of the links between nodes
    exposed_tp: float = 0.7  # of tensor-parallel communication that nothing hides
    exposed_ep: float = 0.7  # of the exchange of tokens between experts that nothing hides
    exposed_dp: float = 0.3  # of data-parallel communication that nothing hides
    exposed_pp: float = 0.7  # of transfers between stages that nothing hides
    per_layer: float = 100e-6  # seconds per block and pass that no size explains: launches, host
    per_route: float = 2e-4  # the same for the routing of a block with experts
    per_step: float = 0.05  # seconds per step: data, logging, the optimizer's launches


RANGES: dict[str, tuple[float, float]] = {
    "matmul": (0.15, 1.0),
    "small": (1.0, 2000.0),
    "attention": (0.1, 1.2),
    "experts": (0.05, 1.2),
    "memory": (0.2, 1.0),
    "links": (0.2, 1.0),
    "network": (0.1, 1.0),
    "exposed_tp": (0.02, 1.0),
    "exposed_ep": (0.02, 1.0),
    "exposed_dp": (0.01, 1.0),
    "exposed_pp": (0.02, 1.0),
    "per_layer": (5e-6, 2e-3),
    "per_route": (1e-6, 1e-2),
    "per_step": (1e-3, 1.0),
}


@dataclass(frozen=True)
class Stack:
    """A framework at a time. `fractions` by "device/format"; "*" where a device or a format has none of its own."""

    name: str
    era: str
    fused_attention: bool = True
    gradient_bytes: int = 4
    gather_bytes: int = 2
    scatter_gather: bool = True  # each tensor-parallel rank sends its own part to the next stage
    overlaps_dp: bool = True
    fractions: Mapping[str, Fractions] = field(default_factory=dict)

    def of(self, device: str, form: str) -> Fractions:
        """The fitted numbers for a device and a number format, or the nearest that there are."""
        for key in (f"{device}/{form}", f"*/{form}", f"{device}/16bit", "*/16bit"):
            if key in self.fractions:
                return self.fractions[key]
        return next(iter(self.fractions.values()), Fractions())


STACKS: dict[str, Stack] = {
    s.name: s
    for s in (
        Stack("megatron-2021", "Megatron-LM 2021-2022, A100, no fused attention", False, 4, 2, True, False),
        Stack("bigscience-2022", "Megatron-DeepSpeed 2022, A100, Omni-Path", False, 4, 2, False, False),
        Stack("fsdp-2023", "llm-foundry 2023, PyTorch FSDP, Triton flash attention", True, 2, 2),
        Stack("nemo-2024", "NeMo 24.05 and 24.07, H100, the first FP8 recipes"),
        Stack("nemo-2025", "NeMo 25.02 to 25.05, H100 and GB200"),
        Stack("bridge-2025", "Megatron-Bridge 25.09 and 25.11"),
        Stack("bridge-2026", "Megatron-Bridge 26.02 to 26.08"),
        Stack("titan-2025", "torchtitan 2024-2025, FSDP2", True, 4, 2),
    )
}
DEFAULT = {"a100-40": "megatron-2021", "a100-80": "megatron-2021", "v100": "megatron-2021"}


@cache
def fitted() -> dict[str, Stack]:
    """Every stack with its fitted numbers."""
    text = files("isotron.planner").joinpath("data/efficiency.json").read_text(encoding="utf-8")
    rows: dict[str, dict[str, dict[str, float]]] = json.loads(text)
    return {
        name: replace(stack, fractions={k: fractions(v) for k, v in rows.get(name, {}).items()})
        for name, stack in STACKS.items()
    }


def fractions(row: Mapping[str, Any]) -> Fractions:
    """Fractions from a mapping; names that do not exist are an error of the data file."""
    unknown = set(row) - {f.name for f in fields(Fractions)}
    if unknown:
        raise ValueError(f"efficiency names {sorted(unknown)} do not exist")
    return Fractions(**row)


def stack_for(device: str, name: str = "") -> Stack:
    """A stack by name, or the one whose published runs are on such a device; refuses an unknown name."""
    chosen = name or DEFAULT.get(device, "nemo-2025")
    if chosen not in STACKS:
        raise refuse(f"--stack {name}", f"the stacks are {', '.join(STACKS)}", "--stack nemo-2025")
    return fitted()[chosen]
