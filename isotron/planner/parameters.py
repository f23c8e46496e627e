"""Which parameters each pipeline stage of a layout holds, and the shape of this rank's part of each. PURE.

Everything comes from the model's own layout table and from the functions that cut real buffers (`core/layout.py`,
`core/parallel/buckets.py`). A table has patterns, not names; what stands behind `*` is the blocks of the stage, and
behind `*norm*` the norms that a pre-norm decoder has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from math import prod
from operator import add, sub
from typing import Any

from isotron.core.layout import Ints, Placed, Shard, Table, shard
from isotron.core.parallel.buckets import DENSE, EXPERTS, Span, cut_buckets, rows_between
from isotron.core.parallel.plan import Layout, split_layers
from isotron.core.parallel.split import halves_of, model_costs
from isotron.core.parallel.ties import Holders, holders

# the modules of a stage in the order in which they are registered: buckets are cut in that order
_FIRST, _LAST = ("embed", "positions"), ("norm", "head")
_ATTENTION = ("attention.sinks", "attention.qkv", "attention.out", "attention.q_norm", "attention.k_norm")
_LATENT = (
    *("attention.q_down", "attention.q_norm", "attention.q_up", "attention.kv_down", "attention.kv_norm"),
    *("attention.kv_up", "attention.out"),
)
_MLP = (
    *("mlp_norm", "mlp.up", "mlp.gate_up", "mlp.down"),
    *("mlp.router", "mlp.experts.gate_up", "mlp.experts.down", "mlp.shared.gate_up", "mlp.shared.down"),
    "mlp.shared_gate",
    "attention_post_norm",
    "mlp_post_norm",
)
_CROSS = ("cross_norm", "cross.q", "cross.kv", "cross.out")
# not every family has them, and `*norm*` would match
_OPTIONAL = (
    "cross_norm",
    *("attention.q_norm", "attention.k_norm", "attention.kv_norm"),
    *("attention_post_norm", "mlp_post_norm"),
)
_OPTIONAL_LEAVES = tuple(f"{part}.{leaf}" for part in _OPTIONAL for leaf in ("weight", "bias"))


@dataclass(frozen=True)
class StagePart:
    """A stage as one rank holds it: local shapes in the order of its modules, and the buckets they are cut into."""

    number: int
    layers: range
    halves: tuple[str, ...]
    placed: Mapping[str, Placed]
    spans: tuple[Span, ...]

    @property
    def elements(self) -> int:
        """Weights held, padding and replicas included."""
        return sum(prod(p.shard.shape) for p in self.placed.values())

    @property
    def trained(self) -> int:
        """Those of them that have gradients."""
        return sum(s.stop - s.start for s in self.spans if not s.kind.frozen)

    def run(self, index: int, of_experts: int, lean: bool = False, trained: bool = False) -> int:
        """Elements that a rank keeps of what is shared: number `index` of those that share the shards, `of_experts` of
        those that share the experts'. `lean`: only of what is shared by several; `trained`: only of what it steps.
        """
        return sum(
            runs[of_experts if group == EXPERTS else index]
            for (group, frozen), runs in self.runs.items()
            if (len(runs) > 1 or not lean) and not (trained and frozen)
        )

    @cached_property
    def runs(self) -> Mapping[tuple[str, bool], list[int]]:
        """Elements of the runs of all ranks that share them, by the group of those and whether they are frozen."""
        found: dict[tuple[str, bool], list[int]] = {}
        for s in self.spans:
            key, own = (s.kind.group, s.kind.frozen), map(sub, s.cuts[1:], s.cuts)
            found[key] = list(map(add, found[key], own)) if key in found else list(own)
        return found

    def stepped(self, index: int, of_experts: int) -> Iterator[tuple[str, Ints]]:
        """(global name, shape of the rows) of what it steps, in the order in which it is stepped."""
        shapes = {n: p.shard.shape for n, p in self.placed.items()}
        for s in (s for s in self.spans if not s.kind.frozen):
            run = s.run(of_experts if s.kind.group == EXPERTS else index)
            yield from ((self.placed[name].name, box.shape) for name, box in rows_between(s, shapes, *run))


@lru_cache(maxsize=4096)
def stage_layers(config: Any, layout: Layout) -> tuple[range, ...]:
    """Blocks of every stage."""
    costs = model_costs(config) if layout.layer_split == "balanced" else None
    return tuple(split_layers(config.num_layers, layout, costs))


def rank_stages(
    config: Any, layout: Layout, pp_rank: int, tp_rank: int = 0, frozen: tuple[str, ...] = ()
) -> list[StagePart]:
    """The stages of one pipeline rank, in model order. `frozen`: patterns of names of what is not trained."""
    split, table = stage_layers(config, layout), config.layout(layout.padded_vocab(config.vocab_size))
    held, known, parts = holders(config, table, split), set[str](), []
    for number in (s for s, holder in enumerate(layout.placement) if holder == pp_rank):
        ends, own = (number == 0, number == layout.stages - 1), (split[number], halves_of(split, number))
        names = stage_names(config, table, own[0], *ends, own[1])
        parts.append(_part(table, number, own, names, layout, tp_rank, held, known, frozen))
    return parts


def _part(
    table: Table, number: int, own: tuple[range, tuple[str, ...]], names: Iterable[str], layout: Layout, tp_rank: int,
    held: Holders, known: set[str], frozen: tuple[str, ...],
) -> StagePart:  # fmt: skip
    """`known`: what the rank's stages before it own of what several stages hold."""
    sizes = layout.axes
    coordinate = {**dict.fromkeys(sizes, 0), "tp": tp_rank, "etp": tp_rank % layout.expert_tp}
    placed, shards = {}, dict[int, Shard]()
    for name in names:
        canonical = table.canonical(name)
        if canonical in known:
            continue
        known |= {canonical} & held.keys()
        rule, counts = table.rule(canonical), number == held.get(canonical, (number,))[0]
        if id(rule) not in shards:
            shards[id(rule)] = shard(rule, coordinate, sizes)
        placed[name] = Placed(canonical, rule, shards[id(rule)], counts)
    classes = layout.classes(held, frozen)
    shapes = {n: p.shard.shape for n, p in placed.items()}
    kinds = {n: classes.of(n, p) for n, p in placed.items()}
    ways = {DENSE: layout.shard_ranks, EXPERTS: layout.expert_shard_ranks}
    spans = cut_buckets(shapes, kinds, layout.ddp_bucket_size, ways)
    return StagePart(number, *own, placed, tuple(spans))


def stage_names(
    config: Any, table: Table, layers: range, first: bool, last: bool, halves: tuple[str, ...] = ()
) -> Iterator[str]:
    """Parameter names of a stage in the order in which its modules are registered; `halves`: what it has of blocks."""
    if hasattr(config, "ends_of"):
        modules = list(config.ends_of(layers, first, last))
    else:
        modules = [*(_FIRST if first else ()), *(_LAST if last else ())]
    latent = any(rule.pattern.endswith("attention.kv_up.weight") for rule in table.rules)
    block = ("attention_norm", *(_LATENT if latent else _ATTENTION), *_MLP, *_CROSS)
    yield from (name for module in modules for name in _leaves(table, module))
    inside: dict[str, list[str]] = {}  # names behind that of a block, where all blocks have the same
    for i, half in zip(layers, halves or ("",) * len(layers), strict=True):
        if half not in inside or not table.alike:
            parts = [f"layers.{i}.{part}" for part in block if part.startswith(half)]
            inside[half] = [name.split(".", 2)[2] for part in parts for name in _leaves(table, part)]
        yield from (f"layers.{i}.{name}" for name in inside[half])
    if last:
        yield from (name for module in _predictions(table, block) for name in _leaves(table, module))


def _leaves(table: Table, module: str) -> Iterator[str]:
    """The parameters of a module, the first of one without a module."""
    aliases = {alias for alias, _ in table.ties if alias.startswith("mtp")}
    for name in (module, f"{module}.weight", f"{module}.bias"):
        if name in aliases or any(_matches(name, rule.pattern) for rule in table.rules):
            yield name


def _predictions(table: Table, block: tuple[str, ...]) -> list[str]:
    """Modules for tokens further ahead, after all blocks."""
    depths = sorted({int(rule.pattern.split(".")[1]) for rule in table.rules if rule.pattern.startswith("mtp.")})
    parts = ("enorm", "hnorm", "join", *(f"block.{part}" for part in block), "norm")
    return [*(["mtp_embed"] if depths else []), *(f"mtp.{k}.{part}" for k in depths for part in parts)]


def _matches(name: str, pattern: str) -> bool:
    if not fnmatchcase(name, pattern):
        return False
    return not (pattern.startswith("*") and name.endswith(_OPTIONAL_LEAVES))


@lru_cache(maxsize=64)
def count_parameters(config: Any) -> int:
    """Elements of the whole model, each once, without padding."""
    table = config.layout(config.vocab_size)
    names = {table.canonical(n) for n in stage_names(config, table, range(config.num_layers), True, True)}
    return sum(prod(table.rule(n).shape) for n in names)
