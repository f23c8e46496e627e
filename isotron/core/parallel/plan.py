"""The layout of a run: how many ranks along each axis and what is sharded over them. PURE.

`Layout` is the config section `[layout]`; `split_layers` deals blocks to pipeline stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from isotron.core.options import option
from isotron.core.parallel.buckets import Classes
from isotron.core.parallel.offload import Offload
from isotron.core.parallel.pipeline import library, registry
from isotron.core.parallel.pipeline.actions import Schedule
from isotron.core.parallel.pipeline.live import with_sums, with_weights
from isotron.core.parallel.split import (
    LayerCosts,
    balanced_counts,
    check_counts,
    check_cuts,
    even_counts,
    layout_counts,
    ranges_of,
    stage_count,
)


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes and what follows from them. Rank order: TP fastest, then CP, DP, PP."""

    tp: int = option(1, "tensor-parallel ranks: every layer is split over them")
    pp: int = option(1, "pipeline-parallel ranks: layers are dealt to them")
    dp: int = option(0, "data-parallel ranks; 0 means 1 on CPU and what the world allows elsewhere")
    vpp: int = option(1, "pipeline stages (model chunks) per pipeline rank; the V-shaped schedules always have 2")
    sequence_parallel: bool = option(False, "split norms, dropout and residuals over TP along the sequence")
    zero: int = option(
        -1,
        "what is sharded over DP: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too; -1 means 1 when dp > 1",
        choices=(-1, 0, 1, 2, 3),
    )
    schedule: str = option(
        "auto",
        f"pipeline schedule: {', '.join(registry.NAMES)}, or the path of a table (.txt, .csv); auto is 1f1b, or "
        "interleaved when vpp > 1, or what schedule_memory allows",
    )
    schedule_memory: float = option(
        0.0,
        "with schedule auto, take the shortest schedule that keeps at most this many microbatches per rank (1f1b keeps "
        "pp); 0 means no search",
        unit="microbatches",
    )
    schedule_costs: tuple[int, ...] = option(
        (),
        "what that search assumes a rank's layers to cost: forward, input gradient, weight gradient and transfer, in "
        "any unit; or these four (and, fifth, what a microbatch keeps) for every stage; empty means counted from the "
        "model",
    )
    microbatch_group: int = option(0, "microbatches per chunk at a time in the interleaved schedule; 0 means pp")
    layers_per_stage: tuple[float, ...] = option(
        (),
        "blocks of each pipeline stage, first to last: 3,5; of a block cut in two, 3.5,4.5, the first stage has the "
        "attention and the next the MLP; empty means an even split",
    )
    first_stage_layers: int = option(0, "blocks of the first pipeline stage; 0 means as even as the rest")
    last_stage_layers: int = option(0, "blocks of the last pipeline stage; 0 means as even as the rest")
    layer_split: str = option(
        "even",
        "how blocks are dealt to stages where no numbers are given: even, or balanced by cost with the output layer, "
        "cut into attention and MLP where that makes the slowest stage faster",
        choices=("even", "balanced"),
    )
    pipeline_layout: str = option(
        "",
        "blocks of the stages as a string: E embedding, t block, L output layer, bars between stages, *n repeats: "
        "Et*3|(tt|)*2,L",
    )
    cp: int = option(1, "context-parallel ranks: the slots of every sequence are dealt to them")
    cp_comm_type: tuple[str, ...] = option(
        ("p2p",),
        "how keys and values of other context-parallel ranks are met: p2p (ring), allgather, a2a (heads are dealt) or "
        "a2a+p2p; one for all layers, or one per layer",
    )
    hierarchical_cp_sizes: tuple[int, ...] = option(
        (), "under a2a+p2p, ranks of an all-to-all and ranks of a ring; their product is cp"
    )
    hybrid_context_parallel: bool = option(
        False, "deal every document of a global batch to 1, 2, 4 .. of the dp x cp ranks, by its length"
    )
    max_seqlen_per_dp_cp_rank: int = option(
        0, "under hybrid_context_parallel, most slots of a microbatch on one rank; 0 means seq_length / cp"
    )
    hybrid_costs: tuple[float, ...] = option(
        (),
        "work of a token, of a pair of query and key and, if given, of a microbatch by itself and of passing a token's "
        "keys and values on once, in any unit, by which documents are dealt; empty means multiply-adds",
    )
    ep: int = option(1, "expert-parallel ranks: the experts of every block are dealt to them")
    etp: int = option(0, "ranks over which the width of each expert is split; 0 means tp")
    moe_token_dispatcher_type: str = option(
        "alltoall",
        "how tokens meet experts of other ranks: alltoall sends each to the ranks of its experts, allgather all to all",
        choices=("alltoall", "allgather"),
    )
    overlap_moe_expert_parallel_comm: bool = option(
        False, "a block's experts compute one half of a microbatch while the tokens of the other are under way"
    )
    attention_backend: str = option(
        "auto",
        "attention kernels: auto (flash where nothing hinders it), flash (torch's or the flash-attn package's), fused "
        "(also FlexAttention), unfused (probabilities as tensors)",
        choices=("auto", "flash", "fused", "unfused"),
    )
    recompute: str = option(
        "none",
        "computed again in the backward: none, selective (norms, activations, probabilities), full (whole blocks)",
        choices=("none", "selective", "full"),
    )
    recompute_method: str = option(
        "uniform",
        "under recompute = full: uniform (units of recompute_num_layers blocks keep their input) or block (the first "
        "recompute_num_layers blocks of a stage are recomputed, the others keep everything)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int = option(1, "blocks per recomputed unit under recompute = full, or recomputed blocks")
    recompute_modules: tuple[str, ...] = option(
        ("core_attn", "layernorm", "moe_act"),
        "what recompute = selective computes again: core_attn (explicit probabilities), layernorm (norms), moe_act "
        "(activations of MLPs and experts), mlp (whole MLPs and experts)",
    )
    distribute_saved_activations: bool = option(
        False, "under recompute = full, each tensor-parallel rank keeps its share of a unit's input"
    )
    mlp_chunks: int = option(
        1, "parts of a sequence that an MLP computes one after the other, each again in the backward; 1 means whole"
    )
    activation_budget_gib: float = option(
        0.0,
        "what is recomputed is chosen: the least work that keeps a rank's activations within this; 0 means no choice",
        unit="GiB",
    )
    cpu_offloading: bool = option(False, "keep activations of blocks in host memory until their backward")
    cpu_offloading_num_layers: int = option(
        0, "under cpu_offloading, of how many blocks of each stage, from its first on; 0 means all"
    )
    recompute_keep: int = option(
        0, "microbatches in flight per stage that keep everything under recompute = full", unit="microbatches"
    )
    deferred_logits: int = option(
        256,
        "under schedules that split the backward, what is kept of a microbatch's logit gradients until its weight "
        "gradient; logits beyond it are computed again there",
        unit="MiB",
    )
    make_vocab_size_divisible_by: int = option(128, "the held vocabulary is a multiple of this times tp")
    overlap_grad_reduce: bool = option(True, "start reducing a bucket's gradients while the backward goes on")
    overlap_param_gather: bool = option(True, "gather a bucket's weights while the next forward begins")
    ddp_bucket_size: int = option(40_000_000, "parameters per gradient bucket")
    zero_shard_size: int = option(
        0, "data-parallel ranks that share one set of shards, copied over the rest (hybrid); 0 means all", unit="ranks"
    )
    fp32_residual_connection: bool = option(
        False, "with 16-bit weights, what blocks add to is kept, and sent between stages, in float32"
    )
    grad_reduce_dtype: str = option(
        "auto",
        "type in which gradients travel between data-parallel ranks; auto is that of their sums",
        choices=("auto", "float64", "float32", "bfloat16"),
    )
    main_grads_dtype: str = option(
        "auto",
        "type in which gradients add up and are kept: auto is float32 or wider; 16-bit weights may have theirs",
        choices=("auto", "bfloat16", "float16"),
    )
    max_live_parameters: int = option(
        0,
        "under zero 3, weights that may stay gathered on a rank from one microbatch to the next, whole stages at a "
        "time; what does not fit comes and goes block by block",
        unit="parameters",
    )
    max_live_gradients: int = option(
        0,
        "under zero 2 and 3, gradients that may wait on a rank from one microbatch to the next, whole stages at a "
        "time; the others are summed over ranks in every microbatch",
        unit="parameters",
    )
    optimizer_cpu_offload: bool = option(False, "masters and moments live in host memory and are stepped there")
    optimizer_offload_fraction: float = option(1.0, "share of the elements for which optimizer_cpu_offload does so")
    offload_gradients: bool = option(
        False, "under zero 2 and 3, sums of gradients live in host memory, where the optimizer steps"
    )
    offload_weights: bool = option(False, "under zero 3, the own shards of weights live in host memory")
    offload_dir: str = option(
        "", "directory on a local disk for files of what is offloaded, instead of host memory; empty means memory"
    )
    offload_dir_for: tuple[str, ...] = option(
        ("state", "weights", "activations"),
        "what of it goes to files: state (masters and moments), weights, activations; the others stay in host memory",
    )

    @property
    def offload(self) -> Offload:
        """What lives on the host."""
        fraction = self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0
        state, weights = (self.files_for(what) for what in ("state", "weights"))
        return Offload(fraction, state, self.offload_weights, weights, self.offload_gradients)

    def files_for(self, what: str) -> str:
        """The directory for files of `state`, `weights` or `activations`, if there is one."""
        return self.offload_dir if what in self.offload_dir_for else ""

    @property
    def stages(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.chunks

    @property
    def chunks(self) -> int:
        """Pipeline stages per rank: vpp, or what the schedule or the layout string makes of it."""
        if self.pipeline_layout and self.pp > 1:
            return max(1, stage_count(self.pipeline_layout) // self.pp)
        return registry.stages_per_rank(self.schedule, self.pp, self.vpp)

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage -> pipeline rank, the same for any number of microbatches."""
        return library.placement(self.schedule, self.pp, self.chunks, self.schedule_memory)

    def table(
        self,
        microbatches: int,
        forward_only: bool = False,
        weights: Mapping[int, int] | None = None,
        gradients: Mapping[int, int] | None = None,
    ) -> Schedule:
        """The pipeline table of a step, or of an evaluation.

        `weights`: elements that stages gather under ZeRO-3; those that fit into `max_live_parameters` are held by it.
        `gradients`: those that stages do not keep whole under ZeRO-2 and 3.
        """
        make = library.forward_only if forward_only else library.plan
        group, memory, costs = self.microbatch_group, self.schedule_memory, self.schedule_costs
        table = make(self.schedule, self.pp, microbatches, self.chunks, group, memory, costs)
        come, summed = ({s: n for s, n in (each or {}).items() if n} for each in (weights, gradients))
        if summed and not forward_only:
            table = with_sums(table, summed, self.max_live_gradients)
        return with_weights(table, come, self.max_live_parameters) if come and self.max_live_parameters else table

    @property
    def world(self) -> int:
        """Ranks in all (dp must be known)."""
        return self.tp * self.pp * self.cp * max(self.dp, 1)

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes (dp must be known)."""
        return {
            "tp": self.tp, "cp": self.cp, "dp": max(self.dp, 1), "pp": self.pp, "etp": self.expert_tp, "ep": self.ep
        }  # fmt: skip

    @property
    def expert_tp(self) -> int:
        """Ranks over which the width of an expert is split."""
        return self.etp or self.tp

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return max(1, self.tp * self.data_ranks // (self.expert_tp * self.ep))

    @property
    def expert_shard_ranks(self) -> int:
        """Of those, the ranks over which a tensor is sharded."""
        whole = self.expert_data_ranks
        return min(self.zero_shard_size or whole, whole) if self.zero_stage else 1

    @property
    def in_rounds(self) -> bool:
        """Whether ranks that are dealt documents meet in every microbatch, so that each must have as many."""
        together = self.pp > 1 or self.zero_stage > 1 or self.ep > 1 or self.expert_tp != self.tp
        return self.hybrid_context_parallel and together

    def cp_type(self, layer: int) -> str:
        """How a block's keys and values travel under context parallelism."""
        return self.cp_comm_type[layer % len(self.cp_comm_type)]

    @property
    def shards_optimizer(self) -> bool:
        """Whether optimizer state is sharded over DP (ZeRO-1 and more)."""
        return self.zero_stage > 0

    @property
    def zero_stage(self) -> int:
        """What is sharded, with -1 resolved; nothing where there is one data-parallel rank."""
        if self.data_ranks == 1:
            return 0
        return 1 if self.zero == -1 else self.zero

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same weights and see other tokens: gradients are summed over them."""
        return max(self.dp, 1) * self.cp

    @property
    def shard_ranks(self) -> int:
        """Data-parallel ranks over which a tensor is sharded; each part is held data_ranks / shard_ranks times."""
        return (self.zero_shard_size or self.data_ranks) if self.zero_stage else 1

    def classes(self, ties: Collection[str], frozen: tuple[str, ...] = ()) -> Classes:
        """How parameters are kept apart in buckets. `ties`: names of what several stages hold."""
        lean = self.shard_ranks > 1
        split_early = lean and self.zero_stage >= 2 and self.pp > 1
        return Classes(frozenset(ties), lean and self.zero_stage == 3, split_early, frozen)

    @property
    def schedule_name(self) -> str:
        """The schedule with auto resolved."""
        return self.schedule if self.schedule_memory else registry.resolved(self.schedule, self.chunks)

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows held for the vocabulary: a multiple of make_vocab_size_divisible_by x tp."""
        unit = self.make_vocab_size_divisible_by * self.tp
        return -(-vocab_size // unit) * unit


def split_layers(num_layers: int, layout: Layout, costs: LayerCosts | None = None) -> list[range]:
    """Global block numbers of each pipeline stage; a block that two of them have is cut between them (`split.py`).

    `costs`: what layer_split = balanced balances; without them every block costs the same and the ends nothing.
    """
    stages = layout.stages
    counts: Sequence[float]
    if layout.pipeline_layout:
        counts = layout_counts(layout.pipeline_layout)
    elif layout.layers_per_stage:
        counts = layout.layers_per_stage
    elif layout.layer_split == "balanced":
        counts = balanced_counts(costs or LayerCosts((1.0,) * num_layers), stages)
    else:
        counts = even_counts(num_layers, stages, layout.first_stage_layers, layout.last_stage_layers)
    check_counts(counts, num_layers, stages)
    check_cuts(counts, costs is None or bool(costs.attention))
    return ranges_of(counts)
