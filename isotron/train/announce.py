"""What a run says of itself before its first step: sizes, layout, what is dealt and kept in another way than usual."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from isotron.config.schema import RunConfig
from isotron.core.nn.attention import Causal
from isotron.core.parallel.deal import sizes_of
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout, split_layers
from isotron.core.parallel.split import counts_of, model_costs
from isotron.tokenizers.base import Tokenizer, other_files
from isotron.tokenizers.config import DESCRIPTOR


def start_lines(config: RunConfig, model: ParallelModel, ranks: int) -> list[str]:
    """One line for each thing that is to be known."""
    lines = [f"{model.count_parameters():,} parameters on {ranks} rank(s): {_describe(config)}"]
    lines += [f"attention: {line}" for line in attention_kernels(model)]
    if config.layout.pp > 1:
        lines.append(f"layers per stage: {' '.join(map(str, layers_per_stage(config)))}")
    return [*lines, *dealt_lines(config), *offload_lines(config.layout)]


def _describe(config: RunConfig) -> str:
    layout = config.layout
    cp = f", cp {layout.cp} ({' '.join(layout.cp_comm_type)})" if layout.cp > 1 else ""
    axes = f"tp {layout.tp}, pp {layout.pp}{cp}, dp {layout.dp}"
    return f"{axes}, {layout.schedule_name}, zero {layout.zero_stage}, {config.train.dtype}"


def attention_kernels(model: ParallelModel) -> list[str]:
    """What computes attention on this rank, each kernel once."""
    cores = [m for stage in model.stages.values() for m in stage.module.modules() if isinstance(m, Causal)]
    size = model.config.head_size
    return list(dict.fromkeys(core.chosen(model.dtype, model.device, size) for core in cores))


def layers_per_stage(config: RunConfig) -> list[float]:
    """Layers of each pipeline stage, in the order in which a token passes through them."""
    return counts_of(split_layers(config.model.num_layers, config.layout, model_costs(config.model)))


def dealt_lines(config: RunConfig) -> list[str]:
    """Under hybrid context parallelism: to how many ranks a document may go, and how much of it to one."""
    layout = config.layout
    if not layout.hybrid_context_parallel:
        return []
    ranks = layout.data_ranks
    sizes = ", ".join(map(str, sizes_of(ranks)))
    slots = layout.max_seqlen_per_dp_cp_rank or -(-config.data.seq_length // layout.cp)
    by = "costs given" if layout.hybrid_costs else "multiply-adds"
    return [f"hybrid context parallelism: each document on {sizes} of {ranks} dp x cp ranks, at most {slots} slots of "
            f"a microbatch on one, balanced by {by}"]  # fmt: skip


def offload_lines(layout: Layout) -> list[str]:
    """What lives in host memory or in files instead of on the device."""

    def place(what: str) -> str:
        return f"in files of {layout.files_for(what)}" if layout.files_for(what) else "in host memory"

    found = []
    if layout.offload.fraction:
        share = f" of {layout.offload.fraction:.0%} of the elements" if layout.offload.fraction < 1 else ""
        found.append(f"masters and moments{share} {place('state')}")
    if layout.offload.gradients:
        found.append("sums of gradients in host memory")
    if layout.offload.weights:
        found.append(f"own shards of weights {place('weights')}")
    if layout.cpu_offloading:
        blocks = layout.cpu_offloading_num_layers
        found.append(f"activations of {blocks or 'all'} blocks of each stage {place('activations')}")
    return [f"offloaded: {', '.join(found)}"] if found else []


def other_tokenizer_lines(tokenizer: Tokenizer | None, loaded: Path | None) -> list[str]:
    """Of a run that goes on with another tokenizer than its checkpoint has; what is not readable there says nothing."""
    path = None if loaded is None else loaded / "tokenizer" / DESCRIPTOR
    if tokenizer is None or path is None or not path.is_file():
        return []
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []
    other = other_files(stored, tokenizer) if isinstance(stored, dict) else ""
    own = f"the tokenizer is not the one in {loaded}: {other}; that one is --tokenizer-model {path.parent}"
    return [own] if other else []


def longer_lines(before: Sequence[int], after: Sequence[int]) -> list[str]:
    """Of a run that has been made longer: what it reads further is not what one run of its whole length reads there."""
    if not before or len(after) <= len(before):
        return []
    more = sum(after) - sum(before)
    return [f"made longer: {more:,} samples follow the {sum(before):,} that this run was of, in an order of their own; "
            "one run of the whole --train-iters reads others there"]  # fmt: skip
