"""Does a run fit into the memory that is free, before any process starts? PURE.

The bytes are the planner's; what is free is asked for where the processes will run.
"""

from __future__ import annotations

from isotron.config.schema import RunConfig
from isotron.core.errors import Problem, Refused, refuse
from isotron.planner.job import Job
from isotron.planner.memory import Bytes, plan_memory
from isotron.planner.remedies import changes
from isotron.planner.smaller import largest_tensor, smaller_sizes

GB = 1e9
ENOUGH = 0.9  # of the bytes that were too many: a change to less than this is worth trying


def rank_bytes(config: RunConfig) -> list[float]:
    """Bytes of one process of every pipeline rank, copies for saves in the background with them."""
    return job_bytes(config, Job.of(config))


def job_bytes(config: RunConfig, job: Job) -> list[float]:
    """The same for a job of the run in another layout."""
    staged = config.checkpoint.async_save and config.train.device == "cpu"
    return [b.total + (_staged(job, b) if staged else 0.0) for b in plan_memory(job)]


def _staged(job: Job, b: Bytes) -> float:
    """What a rank copies: its share of the weights, and its optimizer state."""
    share = 1 if job.layout.shards_optimizer else job.dp
    return b.weights / job.dp + (b.masters + b.moments) / share


def memory_problem(config: RunConfig, free: float, on_cpu: bool, processes: int) -> Problem | None:
    """Why the run does not fit into `free` bytes: of this machine for `processes` of it, or of one device."""
    job, layout = Job.of(config), config.layout

    def needed(other: Job, run: RunConfig = config) -> float:
        every = job_bytes(run, other)
        return sum(every) / len(every) * processes if on_cpu else max(every)

    need = needed(job)
    if need <= free:
        return None
    asked = f"a model of this size with --tp {layout.tp} --pp {layout.pp} --dp {layout.dp} --dtype {config.train.dtype}"
    where = f"{processes} process(es) on this machine need" if on_cpu else "the fullest device needs"
    case = f"{where} {need / GB:.3g} GB and {free / GB:.3g} GB are free (a rank's GB: {by_kind(job)})"
    fit = [text for text, other in changes(job, more=not on_cpu) if needed(other) <= free][:3]
    if fit:
        return Problem(asked, case, "; or ".join(fit))
    name, shape, size = largest_tensor(job)
    case += (
        f"; the largest tensor, {name} of {' x '.join(f'{n:,}' for n in shape)}, has {size * job.element / GB:.3g} GB"
    )
    sizes = smaller_sizes(config, lambda other: needed(Job.of(other), other) <= free)
    fix = "; or ".join(sizes) or "several sizes that are smaller together: no single one would do"
    return Problem(asked, case, f"{fix}; or more machines: isotron plan says how many")


def by_kind(job: Job) -> str:
    """Gigabytes of the fullest rank by kind."""
    b = max(plan_memory(job), key=lambda b: b.total)
    parts = {"weights": b.weights, "gradients": b.gradients, "masters and moments": b.masters + b.moments,
             "activations": b.activations, "for a moment": b.total - b.states - b.activations}  # fmt: skip
    return ", ".join(f"{name} {size / GB:.3g}" for name, size in parts.items())


def out_of_memory(config: RunConfig, error: BaseException) -> Refused | None:
    """The refusal for a failed allocation, with the planner's bytes; None for other errors."""
    text = str(error)
    if not isinstance(error, MemoryError) and not any(words in text for words in _FAILED):
        return None
    job = Job.of(config)
    need = max(rank_bytes(config))
    asked = f"--micro-batch-size {config.train.micro_batch_size} --seq-length {config.data.seq_length}"
    case = f"memory ran out; a rank was planned to need {need / GB:.3g} GB ({by_kind(job)}): "
    smaller = ((text, max(job_bytes(config, other)) / GB) for text, other in changes(job))
    fit = [f"{text} ({size:.3g} GB)" for text, size in smaller if size * GB < ENOUGH * need][:3]
    fix = "; or ".join(fit) or "fewer --num-layers, a shorter --seq-length, or more --tp, --pp and --dp"
    return refuse(asked, case + (text.splitlines()[0] if text else ""), fix, exit_code=1)


_FAILED = ("can't allocate memory", "out of memory")
