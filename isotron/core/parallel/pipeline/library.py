"""Complete tables, ready to run: what the runtime, the commands and the tests ask for. PURE."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from isotron.core.errors import refuse
from isotron.core.parallel.pipeline import registry, search, tables
from isotron.core.parallel.pipeline.actions import Action, Kind, Schedule
from isotron.core.parallel.pipeline.passes import with_communication, with_reduce
from isotron.core.parallel.pipeline.timeline import Costs
from isotron.core.parallel.pipeline.vshape import vee


@lru_cache(maxsize=32)
def plan(
    name: str, p: int, m: int, v: int = 1, group: int = 0, memory: float = 0, costs: tuple[float, ...] = ()
) -> Schedule:
    """The complete table of schedule `name` for p ranks, m microbatches and v stages per rank.

    `group`: microbatches per chunk of the interleaved schedule. `auto` with a `memory` limit (in microbatches of a
    whole rank) is searched for `costs`, as `costs_of` reads them.
    """
    if name == "auto" and memory and p > 1:
        found = search.search(p, m, costs_of(costs, p, v), memory, (placement(name, p, v, memory),))
        return replace(found.table, name="auto")
    return complete(registry.build(registry.resolved(name, v), p, m, registry.stages_per_rank(name, p, v), group))


@lru_cache(maxsize=32)
def forward_only(
    name: str, p: int, m: int, v: int = 1, group: int = 0, memory: float = 0, costs: tuple[float, ...] = ()
) -> Schedule:
    """The forwards of a schedule alone, with their transfers: evaluation."""
    if tables.is_file(name):  # made for one number of microbatches, and evaluations may have another
        home = tables.read(name).placement
        rows = tuple(
            tuple(Action(Kind.F, s, i) for i in range(m) for s, holder in enumerate(home) if holder == rank)
            for rank in range(p)
        )
        return with_communication(Schedule(name, rows, home, m))
    table = plan(name, p, m, v, group, memory, costs)
    rows = tuple(
        tuple(replace(part, also=None) for a in row for part in a.parts if part.kind is Kind.F) for row in table.ranks
    )
    return with_communication(Schedule(table.name, rows, table.placement, table.microbatches))


def placement(name: str, p: int, v: int, memory: float = 0) -> tuple[int, ...]:
    """Stage -> rank, whatever the number of microbatches; a searched table with two stages per rank is a V."""
    if name == "auto" and memory and v == 2 and p > 1:
        return vee(p)
    return registry.placement(registry.resolved(name, v), p, registry.stages_per_rank(name, p, v))


def complete(table: Schedule) -> Schedule:
    """The table with transfers and reductions, where it has none."""
    kinds = {action.kind for row in table.ranks for action in row}
    if not any(action.transfers for row in table.ranks for action in row):
        table = with_communication(table)
    return table if Kind.REDUCE in kinds else with_reduce(table)


def costs_of(numbers: tuple[float, ...], p: int = 1, v: int = 0) -> Costs:
    """Costs from numbers: forward, input gradient, weight gradient and, if wanted, transfer of a whole rank.

    Or of every stage, one after the other: 4 numbers each, or 5 with what a microbatch keeps (in any unit: of a whole
    rank it is 1 on average). `v`: stages per rank, 0 if any will do. Refuses other counts.
    """
    if not numbers:
        return Costs()
    widths = [w for w in (4, 5) for per_rank in ((v,) if v else (1, 2, 3)) if w * p * per_rank == len(numbers) > 4]
    whole = len(numbers) in (3, 4)
    rows = [(*numbers, 0)[:4]] if whole else list(zip(*[iter(numbers)] * (widths or [len(numbers)])[0], strict=True))
    if not (whole or widths) or min(numbers) < 0 or max(max(row[:3]) for row in rows) == 0:
        asked = f"--schedule-costs {','.join(f'{n:g}' for n in numbers)}"
        case = "it is forward, input gradient, weight gradient and, if wanted, transfer of a rank"
        raise refuse(asked, f"{case}; or four or five numbers for each of its {p} x {v or 1} stages", "1,1,1,0")
    forward, inputs, weight, transfer, *kept = zip(*rows, strict=True)
    if whole:
        return Costs(forward[0], inputs[0] + weight[0], weight[0], transfer[0])
    sizes = kept[0] if kept and sum(kept[0]) else (1,) * len(rows)
    backward = tuple(b + w for b, w in zip(inputs, weight, strict=True))
    return Costs(forward, backward, weight, transfer, tuple(size * p / sum(sizes) for size in sizes))
