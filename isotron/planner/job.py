"""What is planned: a model, a layout, batches and a dtype. PURE.

`Job` holds what memory and time depend on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from isotron.config.schema import RunConfig
from isotron.core.optim.config import OptimConfig
from isotron.core.parallel.costs import costed
from isotron.core.parallel.pipeline.actions import Schedule
from isotron.core.parallel.plan import Layout

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ROUNDS = 4  # microbatches of a table that is simulated, in multiples of the pipeline's ranks; more only repeat


@dataclass(frozen=True)
class Job:
    """One training step. `config` is a family's config with its vocabulary and positions known."""

    config: Any
    layout: Layout
    seq: int
    micro_batch: int
    global_batch: int
    dtype: str = "bfloat16"
    ep: int = 1
    optim: OptimConfig = OptimConfig()
    whole_recompute: bool = False  # other frameworks compute a recomputed unit to its end, this one to what is read

    @staticmethod
    def of(run: RunConfig) -> Job:
        """The job of a finished run config."""
        t = run.train
        sizes = run.data.seq_length, t.micro_batch_size, t.global_batch_size
        return Job(run.model, run.layout, *sizes, t.dtype, run.layout.ep, run.optim)

    @property
    def element(self) -> int:
        """Bytes of a weight or an activation."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def residual(self) -> int:
        """Bytes of what blocks add to, which is also what stages hand on."""
        return self.wide if self.layout.fp32_residual_connection else self.element

    @property
    def wide(self) -> int:
        """Bytes of a master, a moment, and a gradient unless `gradient` says otherwise."""
        return max(4, self.element)

    @property
    def gradient(self) -> int:
        """Bytes of a gradient that is kept."""
        return self.wide if self.layout.main_grads_dtype == "auto" else self.element

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return max(self.layout.dp, 1)

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""
        return self.layout.cp

    @property
    def data_ranks(self) -> int:
        """Ranks over which gradients are summed and the optimizer is sharded: dp x cp."""
        return self.dp * self.cp

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on one data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def world(self) -> int:
        """Devices."""
        return self.layout.tp * self.layout.pp * self.dp * self.cp

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one context-parallel rank."""
        return self.micro_batch * self.seq // self.cp

    @property
    def output_tokens(self) -> int:
        """Those of them that reach the output layer; an encoder's do not."""
        return self.micro_batch * (getattr(self.config, "decoder_seq_length", 0) or self.seq) // self.cp

    @property
    def step_tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.global_batch * self.seq

    @property
    def simulated(self) -> int:
        """Microbatches of a table that shows all there is to see: the rest repeats its steady part."""
        p, m = self.layout.pp, self.microbatches
        return m if m <= ROUNDS * p else ROUNDS * p + m % p

    def table(self) -> Schedule:
        """The pipeline table, with at most `simulated` microbatches."""
        return costed(self.config, self.layout).table(self.simulated)

    def with_layout(self, **leaves: Any) -> Job:
        """The job with some leaves of its layout replaced."""
        return replace(self, layout=replace(self.layout, **leaves))
