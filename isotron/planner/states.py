"""Bytes of masters and optimizer states on a rank, by the update rule and the type of each. PURE.

Exact: the rows that a rank steps, cut by the functions that cut the real buffers, with the settings that the optimizer
reads (`param_groups`, `freeze`). The means of Adafactor are those of the whole stage, on every rank of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from isotron.core.layout import Ints
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.groups import Settings, settle
from isotron.core.optim.matrices import parts as matrices
from isotron.core.parallel.offload import hosted
from isotron.planner.job import Job
from isotron.planner.parameters import StagePart

BLOCK = 128  # neighbours in a row that share a float32 (core/optim/kept.py)
WIDTHS = {"bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class States:
    """Bytes on the device, and of both on the host."""

    masters: int = 0
    moments: int = 0
    host: int = 0


def states_of(job: Job, parts: Sequence[StagePart], runs: tuple[int, int]) -> States:
    """Of the rank that steps these runs of what all tokens pass and of experts."""
    if _alike(job):
        elements = sum(p.run(*runs, trained=True) for p in parts)
        return States(master(job, elements), moments(job, job.optim.optimizer, (elements,)))
    found = settings(job.optim, parts)
    rows = [(found[name], shape) for p in parts for name, shape in p.stepped(*runs)]
    away = hosted([prod(shape) for _, shape in rows], job.layout.offload.fraction)
    both = [(master(job, prod(shape)), moments(job, s.optimizer, shape)) for s, shape in rows]
    here = both[away:]
    means = sum(_means(shape) for shape in _factored(found, parts)) * job.wide
    return States(sum(m for m, _ in here), sum(n for _, n in here) + means, sum(map(sum, both[:away])))


def _alike(job: Job) -> bool:
    """Whether every element takes the same, whatever it is part of."""
    cfg = job.optim
    wholes = cfg.param_groups or job.layout.offload.fraction or "int8" in (cfg.exp_avg_dtype, cfg.exp_avg_sq_dtype)
    return not wholes and cfg.optimizer not in ("muon", "adafactor")


def settings(cfg: OptimConfig, parts: Sequence[StagePart]) -> dict[str, Settings]:
    """Of every parameter of some stages, by its global name."""
    return settle({p.name: p.rule.shape for part in parts for p in part.placed.values()}, cfg, whole=False)


def master(job: Job, elements: int) -> int:
    """A master beside the weight, or the 16 bits that the weight lacks."""
    if job.wide == job.element:
        return 0
    return elements * (2 if job.optim.master_remainders else job.wide)


def moments(job: Job, rule: str, shape: Ints) -> int:
    """What a rule keeps of rows of a parameter beside means that the whole stage shares."""
    cfg = job.optim
    first = _kept(job, cfg.exp_avg_dtype, shape)
    match rule:
        case "adafactor":
            return 0
        case "sgd":
            return first if cfg.sgd_momentum else 0
        case "lion" | "muon":
            return first
    return first + _kept(job, cfg.exp_avg_sq_dtype, shape)


def per_element(job: Job) -> float:
    """Master and moments of an element of a large matrix under the rule of most, for closed forms."""
    shape = (BLOCK, BLOCK)
    return (master(job, prod(shape)) + moments(job, job.optim.optimizer, shape)) / prod(shape)


def _kept(job: Job, dtype: str, shape: Ints) -> int:
    """Vectors stay wide under int8."""
    if dtype == "float32" or (dtype == "int8" and len(shape) < 2):
        return prod(shape) * job.wide
    rows = prod(shape[:-1])
    return prod(shape) * WIDTHS[dtype] + (4 * rows * -(-shape[-1] // BLOCK) if dtype == "int8" else 0)


def _factored(found: dict[str, Settings], parts: Sequence[StagePart]) -> Iterator[Ints]:
    """The shapes of all matrices and vectors of a stage that Adafactor steps, whatever this rank holds of them."""
    for placed in {p.name: p for part in parts for p in part.placed.values()}.values():
        if found[placed.name].optimizer == "adafactor" and not found[placed.name].frozen:
            yield from (box.shape for box in matrices(placed.rule))


def _means(shape: Ints) -> int:
    """Of rows and of columns; of a vector, its second moments."""
    return prod(shape) if len(shape) < 2 else prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
