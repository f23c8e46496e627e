"""Options of generation: how tokens are chosen, and the layout that a model is given for it. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from isotron.core.errors import Problem
from isotron.core.parallel.plan import Layout


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the likeliest token. top_k: draw from the k likeliest, 0 means all. top_p: draw from the
    likeliest that hold this probability, 0 or 1 means all. seed: other seeds draw other tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 1234

    def problems(self) -> list[Problem]:
        """Every value out of range."""
        rules = (
            (f"--temperature {self.temperature}", math.isfinite(self.temperature) and self.temperature >= 0,
             "the temperature must be a number of 0 or more", "--temperature 0 (greedy) or --temperature 1"),
            (f"--top-k {self.top_k}", self.top_k >= 0,
             "top_k must be 0 (all tokens) or more", "--top-k 0"),
            (f"--top-p {self.top_p}", 0 <= self.top_p <= 1,
             "top_p is a probability between 0 and 1 (0 and 1: all tokens)", "--top-p 0.9"),
        )  # fmt: skip
        return [Problem(asked, case, fix) for asked, fine, case, fix in rules if not fine]


def inference_layout(layout: Layout) -> Layout:
    """The layout for generation: tp, pp and padding as given, and nothing that only training needs.

    A generation has one token per step and no backward: sequence parallelism, recompute, schedules, chunks and
    data-parallel replicas have no place in it, and layers are dealt evenly.
    """
    return replace(
        layout,
        dp=1,
        vpp=1,
        sequence_parallel=False,
        zero=0,
        schedule="auto",
        schedule_memory=0.0,
        microbatch_group=0,
        layer_split="even",
        pipeline_layout="",
        layers_per_stage=(),
        first_stage_layers=0,
        last_stage_layers=0,
        recompute="none",
        recompute_num_layers=1,
        recompute_keep=0,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
