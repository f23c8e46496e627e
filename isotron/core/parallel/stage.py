"""Building a pipeline stage: plain modules of global shape, then this rank's part of every parameter.

A model is first made on the meta device at its global sizes. The layout table then says what this rank holds of each
parameter; that much is allocated, drawn, and put in its place, and the sockets are filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from isotron.core import device as devices
from isotron.core.batch import Batch
from isotron.core.layout import Box, Piece, Placed, Rule, Table, shard
from isotron.core.mesh import Group, Mesh
from isotron.core.nn.attention import Causal
from isotron.core.nn.block import PreNormBlock
from isotron.core.nn.decoder import Decoder
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.linear import GradSink, sink_of
from isotron.core.nn.loss import Head
from isotron.core.nn.router import Router
from isotron.core.parallel.buckets import DENSE, EXPERTS, is_frozen, partial_pieces, partial_rule
from isotron.core.parallel.context import fill_context
from isotron.core.parallel.data import Flat, Partial
from isotron.core.parallel.expert import fill_experts
from isotron.core.parallel.host import HostActivations
from isotron.core.parallel.keep import shared_inputs
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.shards import Sharding, sharing
from isotron.core.parallel.split import halves_of
from isotron.core.parallel.tensor import fill_sockets
from isotron.core.parallel.ties import Holders, holders
from isotron.core.parallel.units import Units
from isotron.core.random import normal_pieces


@dataclass
class Stage:
    """One pipeline stage as this rank holds it. `known`: the parameters that it uses, under
    their global names. `stops`: behind which block each stage of the model ends. `buffers`: names of saved tensors
    without a gradient.
    """

    number: int
    module: Decoder
    flat: Flat
    placed: dict[str, Placed]
    known: dict[str, tuple[Placed, nn.Parameter]]
    hidden_size: int
    stops: tuple[int, ...]
    sequence_split: int
    dtype: torch.dtype
    buffers: dict[str, Rule] = field(default_factory=dict)
    units: Units | None = None

    @cached_property
    def sinks(self) -> list[GradSink]:
        """Where the gradients of the parameters that it uses go, those of another stage of this rank too."""
        return [sink for p in self.module.parameters() if (sink := sink_of(p)) is not None]

    def settle(self) -> None:
        """A forward or a backward of the stage is over: what was gathered for it goes."""
        if self.units is not None:
            self.units.settle()

    def gather(self, wanted: bool) -> None:
        """Start to gather all weights and keep them, or let them go."""
        if self.units is not None:
            self.units.hold(wanted)

    @property
    def gathered_elements(self) -> int:
        """Weights that come and go (ZeRO-3)."""
        buckets = [] if self.units is None else [b for unit in self.units.units.values() for b in unit.buckets]
        return sum(b.whole.numel() for b in {id(b): b for b in buckets if b.lean}.values())

    @property
    def summed_elements(self) -> int:
        """Gradients that are not kept whole (ZeRO-2 and 3)."""
        return sum(b.stop - b.start for b in self.flat.buckets if b.streams and b.trained)

    def recompute(self, wanted: bool) -> None:
        """Under full recompute: whether the next forward keeps only the inputs of its recomputed units."""
        self.module.recompute = "full" if wanted else "none"

    def boundary_shapes(self, batch: Batch, behind: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of the tensors that stage `behind` hands on."""
        dtype = self.dtype if self.module.widths is None else self.module.widths[0]
        rows, split, width = len(batch.tokens), self.sequence_split, self.hidden_size
        sizes = self.module.hands_on(batch, self.stops[behind])
        shapes = {n: (rows, size // split, width) if isinstance(size, int) else size for n, size in sizes.items()}
        return {name: (shape, dtype) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Setup:
    """What all stages of a model have in common. `split`: the blocks of each; `frozen`: patterns of global names of
    parameters that are not trained.
    """

    cfg: Any
    split: Sequence[range]
    layout: Layout
    mesh: Mesh
    dtype: torch.dtype
    device: torch.device
    seed: int
    frozen: tuple[str, ...] = ()

    @cached_property
    def padded(self) -> int:
        """Rows of the vocabulary with its padding."""
        return self.layout.padded_vocab(self.cfg.vocab_size)

    @cached_property
    def table(self) -> Table:
        """What is known of every parameter."""
        return self.cfg.layout(self.padded)  # type: ignore[no-any-return]

    @cached_property
    def held(self) -> Holders:
        """What several stages hold."""
        return holders(self.cfg, self.table, self.split)

    @property
    def wide(self) -> torch.dtype:
        """float32 or wider."""
        return torch.promote_types(self.dtype, torch.float32)


def build_stage(setup: Setup, number: int, beside: Mapping[int, Stage]) -> Stage:
    """Stage `number`, holding blocks `split[number]`, with its initial weights; of a block that it shares with another
    stage, its half.

    `beside`: the stages before it on its rank. What they hold of what several stages hold is here the same parameter,
    which the first of them owns.
    """
    layout, mesh = setup.layout, setup.mesh
    module = _modules(setup, number)
    groups = _tie_groups(setup.held, layout, mesh)
    known = {name: owned for stage in beside.values() for name, owned in stage.known.items() if name in setup.held}
    placed, everything = _place_parameters(module, setup, number, known)
    buffers = _make_buffers(module, setup.table, setup.wide, setup.device)
    fill_sockets(module, everything, mesh.group("tp"), layout.sequence_parallel)
    fill_context(module, layout, mesh)
    fill_experts(module, layout, mesh)
    _set_policies(module, layout, setup.seed, mesh.group("tp"))
    module.widths = (setup.wide, setup.dtype) if layout.fp32_residual_connection and setup.wide != setup.dtype else None
    ties = {name: groups[p.name] for name, p in placed.items() if p.name in groups}
    flat = _make_flat(module, setup, placed, ties)
    units = None
    if flat.plan.classes.by_unit:
        units = module.around = units_of(module, layout, [flat, *(stage.flat for stage in beside.values())])
        if number == len(setup.split) - 1:
            module.head.at_hand = partial(units.at_hand, "head")
    stops, cut = tuple(blocks.stop for blocks in setup.split), layout.tp if layout.sequence_parallel else 1
    return Stage(number, module, flat, placed, known, setup.cfg.hidden_size, stops, cut, setup.dtype, buffers, units)


def _modules(setup: Setup, number: int) -> Decoder:
    """The stage's modules at their global sizes, on the meta device."""
    cfg, split = setup.cfg, setup.split
    build = import_module(f"isotron.core.models.{cfg.family}").build
    with torch.device("meta"):
        module: Decoder = build(cfg, split[number], number == 0, number == len(split) - 1, setup.padded)
    for block, half in zip(module.layers.values(), halves_of(split, number), strict=True):
        if half:
            block.keep_half(half)  # type: ignore[operator]
    return module


Known = dict[str, tuple[Placed, nn.Parameter]]


def _place_parameters(
    module: Decoder, setup: Setup, number: int, known: Known
) -> tuple[dict[str, Placed], dict[str, Placed]]:
    """Put an empty parameter, or one that is `known` on this rank already, in the place of each; those that this stage
    owns are added to the known ones. Local name -> where it belongs, of what the stage owns and of all that it uses.
    """
    mesh, table = setup.mesh, setup.table
    placed: dict[str, Placed] = {}
    everything: dict[str, Placed] = {}
    for name, p in list(module.named_parameters()):
        canonical = table.canonical(name)
        if canonical in known:
            everything[name], same = known[canonical]
            _put(module, name, same)
            continue
        rule = table.rule(canonical)
        counts = number == setup.held.get(canonical, (number,))[0]
        placed[name] = everything[name] = Placed(canonical, rule, shard(rule, mesh.coordinate, mesh.sizes), counts)
        _check_shape(name, p, placed[name], setup.padded)
        empty = torch.empty(0, dtype=setup.dtype, device=setup.device)
        own = nn.Parameter(empty, requires_grad=not is_frozen(canonical, setup.frozen))
        _put(module, name, own)
        known[canonical] = placed[name], own
    return placed, everything


def _make_flat(module: Decoder, setup: Setup, placed: dict[str, Placed], ties: Mapping[str, Group]) -> Flat:
    """Memory for what the stage owns, with its initial values."""
    pieces = partial_pieces(placed, partial_rule(setup.layout.sequence_parallel))
    partials = Partial(pieces, lambda replicas: setup.mesh.subgroup("tp", replicas))
    plan = _sharding(setup)
    parameters = {name: module.get_parameter(name) for name in placed}
    flat = Flat(parameters, placed, plan, setup.dtype, setup.device, initialiser(setup.seed), partials, ties)
    flat.wait_in_forward(module)
    return flat


def _make_buffers(module: nn.Module, table: Table, dtype: torch.dtype, device: torch.device) -> dict[str, Rule]:
    """Give every buffer its memory, zeros; the same on all ranks that hold the stage."""
    rules = {name: table.rule(name) for name, _ in module.named_buffers()}
    for name, rule in rules.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, torch.zeros(rule.shape, dtype=dtype, device=device))
    return rules


def _sharding(setup: Setup) -> Sharding:
    """What is sharded, over which ranks."""
    layout, mesh = setup.layout, setup.mesh
    dp = mesh.group("cp", "dp")
    groups = {
        DENSE: sharing(dp.ranks, mesh.rank, mesh.group_of, layout.shard_ranks),
        EXPERTS: sharing(mesh.group("edp").ranks, mesh.rank, mesh.group_of, layout.expert_shard_ranks),
    }
    travels, sums, offload = layout.grad_reduce_dtype, layout.main_grads_dtype, layout.offload
    return Sharding(
        zero=layout.zero_stage,
        groups=groups,
        bucket_size=layout.ddp_bucket_size,
        classes=layout.classes(setup.held, setup.frozen),
        overlap=layout.overlap_grad_reduce,
        transport=None if travels == "auto" else devices.dtype_of(travels),
        hosted=offload.weights,
        sums=None if sums == "auto" else devices.dtype_of(sums),
        files=offload.weights_directory,
        hosted_sums=offload.gradients,
    )


def units_of(module: Decoder, layout: Layout, flats: list[Flat]) -> Units:
    """The units of a stage in the order of their use, with their buckets, whichever stage of this rank owns them."""
    buckets = {}
    for name in module.unit_names():
        inside = ("mtp", "mtp_embed", "head") if name == "mtp" else (name,)
        parameters = (p for part in inside for p in module.get_submodule(part).parameters())
        held = (flat.bucket_of.get(id(p)) for p in parameters for flat in flats)
        buckets[name] = list({id(b): b for b in held if b is not None}.values())
    return Units(buckets, layout.overlap_param_gather)


def initialiser(seed: int) -> Callable[[Placed, Box, Tensor], None]:
    """What writes the initial values of rows of a parameter into a tensor of their shape; padding stays zero.

    A row draws the tiles of random numbers that it lies in, so no rank ever holds more than it keeps.
    """

    def fill(placed: Placed, box: Box, out: Tensor) -> None:
        pieces = [part for piece in placed.shard.pieces if (part := piece.restricted(box)) is not None]
        if out.device.type == "cpu":
            initial(placed, pieces, out, seed)
        else:
            out.copy_(initial(placed, pieces, torch.zeros(out.shape, dtype=out.dtype), seed))

    return fill


def initial(placed: Placed, pieces: list[Piece], out: Tensor, seed: int) -> Tensor:
    """Initial values of some pieces of a parameter, in place on the CPU."""
    rule = placed.rule
    if rule.init == "normal":
        normal_pieces(out, pieces, rule.shape, seed, placed.name, rule.std)
        _lessen(rule, pieces, out)
    elif rule.init == "ones":
        for piece in pieces:
            out[piece.local_box.slices()] = 1
    return out


def _lessen(rule: Rule, pieces: list[Piece], out: Tensor) -> None:
    """The first rows of a tensor whose parts begin with different deviations."""
    count, factor = rule.lesser
    first = Box((0,) * len(rule.shape), (count, *rule.shape[1:]))
    for piece in pieces if count else ():
        common = piece.global_box.overlap(first)
        if common is not None:
            out[common.relative_to(piece.global_box).shifted(piece.local_box.offset).slices()] *= factor


def _put(module: nn.Module, name: str, p: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, p)


def _check_shape(name: str, p: Tensor, placed: Placed, padded: int) -> None:
    rule: Rule = placed.rule
    parts = () if rule.split is None else rule.split.parts
    grown = sum(q.padded - q.count for q in parts if q.padded is not None)
    want = tuple(n + (grown if rule.split and d == rule.split.dim else 0) for d, n in enumerate(rule.shape))
    if tuple(p.shape) != want:
        raise ValueError(f"parameter {name} has shape {tuple(p.shape)}, its layout table says {want}")


def _set_policies(module: Decoder, layout: Layout, seed: int, tp: Group) -> None:
    module.recompute, module.recompute_layers = layout.recompute, layout.recompute_num_layers
    module.recompute_method = layout.recompute_method
    if layout.distribute_saved_activations:
        module.keeping = partial(shared_inputs, tp)
    if layout.cpu_offloading:
        module.offloading = HostActivations(
            layout.cpu_offloading_num_layers or len(module.layers), layout.files_for("activations")
        )
    selective = layout.recompute_modules if layout.recompute == "selective" else ()
    for layer in module.modules():
        if isinstance(layer, (Dropout, Router)):
            layer.seed = seed
        if isinstance(layer, Head):
            layer.kept_bytes = layout.deferred_logits << 20
        if isinstance(layer, Causal):
            layer.backend = layout.attention_backend
        if isinstance(layer, PreNormBlock):
            layer.set_recompute(selective)
            layer.set_mlp_chunks(layout.mlp_chunks)
        if isinstance(layer, Decoder) and "mtp" in layer.ends:
            for p in layer.head.parameters():  # the losses further ahead go through it too
                p.writes = 1 + len(layer.mtp)  # type: ignore[arg-type, attr-defined]


def _tie_groups(held: Holders, layout: Layout, mesh: Mesh) -> dict[str, Group]:
    """Of what several stages hold, and this rank with them: the ranks of those stages, each once.

    Made in the order of the names, for ranks that meet in several groups must make them in one order.
    """
    found = {name: mesh.places("pp", (layout.placement[s] for s in held[name])) for name in sorted(held)}
    return {name: group for name, group in found.items() if group is not None}
