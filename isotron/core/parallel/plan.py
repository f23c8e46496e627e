"""The layout of a run: how many ranks along each axis and what is sharded over them. PURE.

`Layout` is the config section `[layout]`; `split_layers` deals blocks to pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.errors import refuse
from isotron.core.options import option


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes and what follows from them. Rank order: TP fastest, then DP, then PP."""

    tp: int = option(1, "tensor-parallel ranks: every layer is split over them")
    pp: int = option(1, "pipeline-parallel ranks: layers are dealt to them")
    dp: int = option(0, "data-parallel ranks; 0 means 1 on CPU and what the world allows elsewhere")
    vpp: int = option(1, "pipeline stages (model chunks) per pipeline rank")
    sequence_parallel: bool = option(False, "split norms, dropout and residuals over TP along the sequence")
    zero: int = option(
        -1, "0: every rank keeps all optimizer state, 1: sharded over DP; -1 means 1 when dp > 1", choices=(-1, 0, 1)
    )
    schedule: str = option(
        "auto",
        "pipeline schedule; auto is 1f1b, or interleaved when vpp > 1",
        choices=("auto", "gpipe", "1f1b", "interleaved"),
    )
    layers_per_stage: tuple[int, ...] = option(
        (), "blocks of each pipeline stage, first to last; empty means an even split"
    )
    first_stage_layers: int = option(0, "blocks of the first pipeline stage; 0 means as even as the rest")
    last_stage_layers: int = option(0, "blocks of the last pipeline stage; 0 means as even as the rest")
    recompute: str = option(
        "none",
        "computed again in the backward: none, selective (norms, activations, probabilities), full (whole blocks)",
        choices=("none", "selective", "full"),
    )
    recompute_num_layers: int = option(1, "blocks per recomputed unit under recompute = full")
    make_vocab_size_divisible_by: int = option(128, "the held vocabulary is a multiple of this times tp")
    overlap_grad_reduce: bool = option(True, "start reducing a bucket's gradients while the backward goes on")
    overlap_param_gather: bool = option(True, "gather a bucket's weights while the next forward begins")
    ddp_bucket_size: int = option(40_000_000, "parameters per gradient bucket")

    @property
    def stages(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.vpp

    @property
    def world(self) -> int:
        """Ranks in all (dp must be known)."""
        return self.tp * self.pp * max(self.dp, 1)

    @property
    def shards_optimizer(self) -> bool:
        """Whether optimizer state is sharded over DP (ZeRO-1)."""
        return self.dp > 1 and self.zero != 0

    @property
    def schedule_name(self) -> str:
        """The schedule with auto resolved."""
        return self.schedule if self.schedule != "auto" else ("interleaved" if self.vpp > 1 else "1f1b")

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows held for the vocabulary: a multiple of make_vocab_size_divisible_by x tp."""
        unit = self.make_vocab_size_divisible_by * self.tp
        return -(-vocab_size // unit) * unit


def split_layers(num_layers: int, layout: Layout) -> list[range]:
    """Global block numbers of each pipeline stage; their lengths always sum to `num_layers`."""
    stages = layout.stages
    if layout.layers_per_stage:
        counts = list(layout.layers_per_stage)
    else:
        fixed = {0: layout.first_stage_layers, stages - 1: layout.last_stage_layers}
        fixed = {i: n for i, n in fixed.items() if n}
        free = [i for i in range(stages) if i not in fixed]
        each, extra = divmod(num_layers - sum(fixed.values()), len(free)) if free else (0, 0)
        counts = [fixed.get(i, 0) for i in range(stages)]
        # one more block to the stages in the middle: the first holds the embedding, the last the head
        middle = sorted(free, key=lambda i: (abs(2 * i - (stages - 1)), i))
        for place, i in enumerate(middle):
            counts[i] = each + (place < extra)
    if len(counts) != stages or sum(counts) != num_layers or min(counts) < 0:
        raise refuse(
            f"num_layers {num_layers} over {stages} pipeline stages as {counts}",
            f"the stages must be {stages} counts >= 0 that sum to {num_layers}, these sum to {sum(counts)}",
            "--layers-per-stage with counts that sum to num_layers, or leave it out for an even split",
        )
    starts = [sum(counts[:i]) for i in range(stages)]
    return [range(a, a + n) for a, n in zip(starts, counts, strict=True)]
