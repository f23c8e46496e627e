"""docs/communication.md against what happens: one traced step per layout, and the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from isotron.core import comm
from isotron.core.mesh import AXES, Mesh, coordinate_of
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.train.step import train_step
from isotron.train.verify import Case, microbatches
from tests.matrix import MODELS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "communication.md").read_text(encoding="utf-8")
TRACED = (
    *("start_all_reduce", "start_all_gather", "start_reduce_scatter", "start_reduce_flat", "start_gather_flat"),
    *("exchange", "broadcast", "barrier", "gather_json", "broadcast_json"),
)
Call = tuple[str, tuple[str, ...], str]

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one process": ("gpt", {}),
    "TP2": ("gpt", {"tp": 2}),
    "TP2+SP": ("llama", {"tp": 2, "sequence_parallel": True}),
    "TP4 over 2 KV heads": ("llama", {"tp": 4}),
    "PP2 tied": ("gpt", {"pp": 2}),
    "PP2 untied": ("llama", {"pp": 2}),
    "PP4 tied": ("gpt", {"pp": 4}),
    "PP2 x 2 chunks": ("llama-tied", {"pp": 2, "vpp": 2}),
    "DP2": ("gpt", {"dp": 2}),
    "DP2 without ZeRO": ("gpt", {"dp": 2, "zero": 0}),
    "DP2 ZeRO-2": ("gpt", {"dp": 2, "zero": 2}),
    "DP2 ZeRO-3": ("gpt", {"dp": 2, "zero": 3}),
    "DP4 in copies of 2": ("gpt", {"dp": 4, "zero": 3, "zero_shard_size": 2}),
    "TP2+SP x DP2": ("gpt", {"tp": 2, "dp": 2, "sequence_parallel": True}),
    "TP2 x PP2 x DP2": ("llama", {"tp": 2, "pp": 2, "dp": 2}),
}


# ---- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    functions: tuple[str, ...]
    group: tuple[str, ...]
    file: str
    condition: str


def rows(heading: str) -> list[Row]:
    """The lines of the table under a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = []
    for line in section.splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if line.startswith("| `"):
            names, files = re.findall(r"`(\w+)`", cells[0]), re.findall(r"`([\w/.]+)`", cells[2])
            found.append(Row(tuple(names), tuple(cells[1].split(", ")), files[0], cells[3]))
    assert found
    return found


def holds(condition: str, model: Any, layout: Layout) -> bool:
    facts = {
        "always": True,
        "SP": layout.sequence_parallel,
        "no SP": not layout.sequence_parallel,
        "tied": model.tie_embeddings,
        "ZeRO": layout.shards_optimizer,
        "copies": layout.shard_ranks < layout.dp,
        "SP or shared heads": layout.sequence_parallel or layout.tp > model.kv_heads,
    }
    return facts[condition]


def expected(model: Any, layout: Layout) -> set[Call]:
    """What the page says of one step in a layout."""
    sizes = {"tp": layout.tp, "dp": layout.dp, "pp": layout.pp}
    calls = set()
    for row in rows("One training step"):
        axes = tuple(a for a in AXES if a in row.group and sizes[a] > 1)
        if axes and holds(row.condition, model, layout):
            calls |= {(name, axes, row.file) for name in row.functions}
    return calls


# ---- what happens ----------------------------------------------------------------------------------------------------


def traced(case: Case) -> list[Call]:
    """(function, axes of its group, calling file) of every communication of this rank in one step."""
    layout, calls = case.layout, set()
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(rank, tp=layout.tp, dp=layout.dp, pp=layout.pp)

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = next(a for a in (*args, *kwargs.values()) if hasattr(a, "ranks"))
            if group.size > 1:
                calls.add((name.removeprefix("start_"), _axes(group.ranks, mesh.sizes), _caller()))
            return real(*args, **kwargs)

        return call

    model = ParallelModel(case.model, layout, mesh, torch.float64, torch.device("cpu"), case.seed)
    optimizer = make_optimizer(model, OptimConfig())
    batches = microbatches(case, 0, mesh.group("dp"))
    patches = [patch.object(comm, name, watch(name, getattr(comm, name))) for name in TRACED]
    for p in patches:
        p.start()
    try:
        train_step(model, optimizer, ScheduleConfig(lr_decay_iters=1), batches)
    finally:
        for p in patches:
            p.stop()
    model.wait_weights()
    return sorted(calls)


def _axes(ranks: tuple[int, ...], sizes: dict[str, int]) -> tuple[str, ...]:
    where = [coordinate_of(r, sizes) for r in ranks]
    return tuple(a for a in AXES if len({w[a] for w in where}) > 1)


def _caller() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, comm.__file__):
        frame = frame.f_back
    return str(Path(frame.f_code.co_filename).relative_to(ROOT / "isotron"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_step_talks_as_the_page_says(ranks: Callable[..., list[Any]], name: str) -> None:
    family, axes = LAYOUTS[name]
    layout = Layout(**{"dp": 1, "make_vocab_size_divisible_by": 8, **axes})
    case = Case(MODELS[family], layout, sequence=16, global_batch=4)
    happened = {tuple(map(_frozen, call)) for rank in ranks(layout.world, traced, case) for call in rank}
    assert happened == expected(case.model, layout)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def test_every_row_happens_in_some_layout() -> None:
    everything: set[Call] = set()
    for family, axes in LAYOUTS.values():
        everything |= expected(MODELS[family], Layout(**{"dp": 1, **axes}))
    for row in rows("One training step"):
        assert any(f in row.functions and where == row.file for f, _, where in everything), row


# ---- the source ------------------------------------------------------------------------------------------------------


def spoken() -> set[tuple[str, str]]:
    """(function, file) of every call of the communication module in isotron, but for those that break things."""
    found = set()
    for path in (ROOT / "isotron").rglob("*.py"):
        if path.name in ("comm.py", "inject.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, name = node.func.value, node.func.attr
                if isinstance(owner, ast.Name) and owner.id == "comm" and name not in ("done", "Pending"):
                    found.add((name.removeprefix("start_"), str(path.relative_to(ROOT / "isotron"))))
    return found


def test_the_page_names_every_file_that_talks() -> None:
    written = {
        (name, row.file)
        for heading in ("One training step", "Around the step")
        for row in rows(heading)
        for name in row.functions
    }
    assert written == spoken()
