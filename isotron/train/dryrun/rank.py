"""One rank of a run: built, and one step taken, with every byte and every communication noted.

`measure` does it in a process group that exists. `dry` does it alone, for any rank of any world: the process group is
torch's fake one, whose collectives do nothing, and tensors have no memory. A step of many microbatches is not computed
whole: most of them are echoes of the second (`echo`). Where they are not, the table repeats itself, so what a round of
microbatches adds is measured once and counted as often as it comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from isotron.config.schema import RunConfig, changed
from isotron.core import comm
from isotron.core import device as devices
from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.t5_config import T5Config
from isotron.core.nn import blocks
from isotron.core.nn.kernels import band
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.optimizer import Optimizer
from isotron.core.parallel import stage as stages
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import split_layers
from isotron.core.parallel.split import halves_of, model_costs
from isotron.train.dryrun.calls import Calls, listening
from isotron.train.dryrun.echo import COMPUTED, Echo, can_echo
from isotron.train.dryrun.live import LiveBytes
from isotron.train.dryrun.transport import holding
from isotron.train.dryrun.values import without_memory
from isotron.train.step import train_step

ROUNDS = 2  # multiples of the pipeline's ranks that a table is run with; it is fullest by then


@dataclass(frozen=True)
class RankReport:
    """One rank. Bytes of what it keeps; `activations`: the most that was alive beside it while the table ran;
    `update`: the most while the optimizer stepped. `microbatches`: those of a step, and those that were run.
    `halves`: what it has of each of its `layers`, "" for all of it.
    """

    rank: int
    coordinate: dict[str, int]
    layers: list[int]
    halves: list[str]
    parameters: int
    weights: int
    gradients: int
    masters: int
    moments: int
    activations: int
    update: int
    microbatches: tuple[int, int]
    calls: Calls
    seconds: float

    @property
    def states(self) -> int:
        """Bytes that stay from step to step."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> int:
        """Bytes at the fullest moment."""
        return self.states + max(self.activations, self.update)


class _Rows(Batch):
    """Whole rows of positions; their greatest is known without looking."""

    @property
    def longest(self) -> int:
        """Positions of a row."""
        return int((self.positions if self.part is None else self.part.positions).shape[1])


def microbatches(config: RunConfig) -> int:
    """Microbatches of a step on one data-parallel rank."""
    return config.train.global_batch_size // (config.train.micro_batch_size * max(config.layout.dp, 1))


def rounds(config: RunConfig) -> tuple[int, int, int]:
    """Microbatches to run, those of a round, and how many rounds more a step has; all where most are mere echoes."""
    pp, m = config.layout.pp, microbatches(config)
    if can_echo(config):
        return m, pp, 0
    few = ROUNDS * pp + m % pp
    return (m, pp, 0) if m <= few + pp else (few + pp, pp, (m - few - pp) // pp)


def passes(config: RunConfig) -> int:
    """Forwards of stages that a dry run of one rank computes."""
    run, one, more = rounds(config)
    return config.layout.chunks * (min(run, COMPUTED) if can_echo(config) else run + (run - one if more else 0))


def dry(config: RunConfig, rank: int, tick: Callable[[], None] = lambda: None) -> RankReport:
    """A rank of a world that need not be there. The config is finished; its vocabulary is known. `tick` is called
    after each of its `passes`.
    """
    started = time.perf_counter()
    config = changed(config, offload_dir="")  # a file takes the bytes that host memory would
    run, one, more = rounds(config)
    with _alone(rank, config.layout.world), without_memory(), _without_numbers():
        mesh = Mesh(rank, **config.layout.axes)
        found = measure(config, mesh, run, True, tick)
        if more:
            shorter = measure(config, mesh, run - one, True, tick)
            found = replace(found, calls=found.calls.extended(shorter.calls, more))
    computed = min(run, COMPUTED) if can_echo(config) else run
    return replace(found, microbatches=(microbatches(config), computed), seconds=time.perf_counter() - started)


@contextmanager
def _alone(rank: int, world: int) -> Iterator[None]:
    """A process group of `world` ranks, of which only this one is there; sums as on the CPU's back end over a network,
    which makes more copies than ranks do that meet in memory.
    """
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with patch.object(comm, "_is_gloo", lambda group: True), holding():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_numbers() -> Iterator[None]:
    """No initial weights are drawn; of passes over large tensors only some blocks are gone through."""
    with (
        patch.object(stages, "initialiser", lambda seed: lambda placed, box, out: None),
        patch.object(blocks, "starts", blocks.some),
    ):
        try:
            yield
        finally:
            band.cache_clear()  # what it remembers has no numbers either


def measure(
    config: RunConfig, mesh: Mesh, count: int, echoes: bool = False, tick: Callable[[], None] = lambda: None
) -> RankReport:
    """Build this rank and take a step of `count` microbatches; `echoes`: those that only repeat are not computed.
    `tick` is called after each forward of a stage.
    """
    started = time.perf_counter()
    band.cache_clear()
    dtype, cpu = devices.dtype_of(config.train.dtype), devices.resolve("cpu")
    model = ParallelModel(config.model, config.layout, mesh, dtype, cpu, config.train.seed, config.optim.freeze)
    optimizer = make_optimizer(model, config.optim)
    batches = [_batch(config, i) for i in range(count)]
    with ExitStack() as stack:
        for stage in model.stages.values():
            stack.enter_context(patch.object(stage.module, "forward", _ticking(stage.module.forward, tick)))
        calls, activations, update = _step(config, model, optimizer, batches, echoes)
    flats = [stage.flat for stage in model.stages.values()]
    split = split_layers(config.model.num_layers, config.layout, model_costs(config.model))
    held = sorted(part for s in model.stages for part in zip(split[s], halves_of(split, s), strict=True))
    masters = optimizer.nbytes("master")
    return RankReport(
        rank=mesh.rank,
        coordinate={axis: mesh.coordinate[axis] for axis in ("tp", "cp", "dp", "pp")},
        layers=[block for block, _ in held],
        halves=[half for _, half in held],
        parameters=sum(prod(p.shard.shape) for stage in model.stages.values() for p in stage.placed.values()),
        weights=sum(f.weights.nbytes for f in flats),
        gradients=sum(f.grads.nbytes for f in flats),
        masters=masters,
        moments=optimizer.nbytes() - masters,
        activations=activations,
        update=update,
        microbatches=(count, count),
        calls=calls,
        seconds=time.perf_counter() - started,
    )


def _ticking(forward: Callable[..., Any], tick: Callable[[], None]) -> Callable[..., Any]:
    def ticked(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        tick()
        return result

    return ticked


def _batch(config: RunConfig, index: int) -> Batch:
    """Full rows of one document each; of a family with an encoder, its rows and the decoder's."""
    b, e = config.train.micro_batch_size, config.data.seq_length
    s = config.model.decoder_seq_length if isinstance(config.model, T5Config) else e
    tokens = (torch.arange(b * s).view(b, s) * 7 + index) % config.model.vocab_size
    rows = torch.arange(s).expand(b, -1)
    data = config.data
    apart = data.reset_attention_mask or data.pack_documents or data.short_seq_prob > 0
    documents = torch.zeros(b, s, dtype=torch.int64) if apart else None
    batch = _Rows(tokens, tokens.clone(), torch.ones(b, s), rows, torch.arange(b) + index * b, documents)
    if isinstance(config.model, T5Config):
        source = (torch.arange(b * e).view(b, e) * 5 + index) % config.model.vocab_size
        return replace(batch, source=source, source_lengths=torch.full((b,), e))
    if documents is not None:
        batch.__dict__["cuts"] = ((0, s),) * b
    return batch


def _step(
    config: RunConfig, model: ParallelModel, optimizer: Optimizer, batches: list[Batch], echoes: bool
) -> tuple[Calls, int, int]:
    """Its communications, and the most bytes alive beside the state in the table and in the update."""
    state: list[Tensor] = [t for stage in model.stages.values() for t in (stage.flat.weights, stage.flat.grads)]
    buckets = [b for stage in model.stages.values() for b in stage.flat.buckets]
    state += [t for slot in optimizer.slots() for t in tensors_of(slot.kept)]
    state += [t for batch in batches for t in tensors_of(batch)]
    live = LiveBytes(state, [b.whole for b in buckets if b.lean])
    peaks: list[int] = []
    real = optimizer.step

    def update(*args: Any) -> None:
        peaks.append(live.peak)
        live.restart()
        real(*args)
        peaks.append(live.peak)

    with listening(model.mesh.sizes) as calls, live, patch.object(optimizer, "step", update), ExitStack() as stack:
        if echoes and can_echo(config) and len(batches) > COMPUTED:
            stack.enter_context(Echo(model, live, calls, len(batches)).listening())
        train_step(model, optimizer, config.schedule, batches)
        model.wait_weights()
    return calls, peaks[0], peaks[1]


def tensors_of(owner: Any) -> list[Tensor]:
    """The tensors that something has."""
    return [t for t in vars(owner).values() if isinstance(t, Tensor)]
