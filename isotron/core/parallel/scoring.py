"""The training forward, asked for every label's log-probability instead of the loss; in any layout.

    scoring = Scoring(model)
    found = scoring.run(batches)      # on every rank; batches of one data-parallel rank

The pipeline's own runtime executes its forward-only table over stages that keep what the output layer says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.nn.linear import GradSink
from isotron.core.parallel.data import Flat
from isotron.core.parallel.pipeline.runtime import Boundary, Runtime

if TYPE_CHECKING:
    from isotron.core.parallel.model import ParallelModel
    from isotron.core.parallel.stage import Stage


class _Asked:
    """A stage whose last module gives scores; a microbatch is known by its labels, which it alone has."""

    def __init__(self, stage: Stage, found: dict[int, Tensor]) -> None:
        self.stage, self.found = stage, found

    def module(
        self, batch: Batch, boundary: Boundary, weight: float
    ) -> tuple[Boundary, dict[str, tuple[Tensor, float]]]:
        """The next boundary and no terms of a loss."""
        onward, scores = self.stage.module.scores(batch, boundary)
        if scores is not None:
            self.found[id(batch)] = scores
        return onward, {}

    @property
    def flat(self) -> Flat:
        """Its gradients, which nobody asks for here."""
        return self.stage.flat

    @property
    def sinks(self) -> list[GradSink]:
        """As in training."""
        return self.stage.sinks

    def boundary_shapes(self, batch: Batch, behind: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """As in training."""
        return self.stage.boundary_shapes(batch, behind)

    def settle(self) -> None:
        """As in training."""
        self.stage.settle()

    def gather(self, wanted: bool) -> None:
        """As in training."""
        self.stage.gather(wanted)

    def recompute(self, wanted: bool) -> None:
        """There is no backward to recompute for."""


class Scoring:
    """Scores with a model as it is; it can be trained on afterwards."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self.microbatches = 2 * model.layout.pp if model.layout.stages > 1 else 1  # what every schedule can take
        mesh = model.mesh
        holder = model.layout.placement[-1]
        self.speaks = mesh.coordinate["pp"] == holder and mesh.coordinate["tp"] == 0
        self.unit = 2 * mesh.sizes["cp"] if mesh.sizes["cp"] > 1 else 1
        if model.layout.sequence_parallel:
            self.unit *= mesh.sizes["tp"]

    @torch.no_grad()
    def run(self, batches: Sequence[Batch]) -> list[Tensor | None]:
        """Per batch [N, 2]: log-probability of each label with a mask (nats), and whether it is the likeliest token.

        Row by row, in the order of the slots that this context-parallel rank holds (`local`); None on ranks without
        the output layer. Every rank calls it with `microbatches` batches whose width is a multiple of `unit`.
        """
        model = self.model
        model.wait_weights()
        found: dict[int, Tensor] = {}
        stages = {number: _Asked(stage, found) for number, stage in model.stages.items()}
        for stage in model.stages.values():
            stage.module.eval()
        local = model.local(batches)
        runtime = Runtime(stages, model.mesh.group("pp"), False)
        runtime.run(model.table(len(batches), forward_only=True), local, 0.0)
        return [found.get(id(batch)) for batch in local]
