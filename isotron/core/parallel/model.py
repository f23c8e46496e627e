"""A model in a layout: this rank's stages, their flat buffers and the runtime. The core's front door.

model = ParallelModel(config, Layout(tp=2, pp=2), mesh, torch.float32, device, seed=1)
loss_sums = model.forward_backward(batches, weight=1 / tokens)   # gradients are summed over the layout afterwards
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.errors import refuse
from isotron.core.layout import Box, whole
from isotron.core.mesh import AXES, Mesh
from isotron.core.parallel.context import local_batch
from isotron.core.parallel.costs import costed
from isotron.core.parallel.data import View
from isotron.core.parallel.deal import Costs, document_costs
from isotron.core.parallel.dealt import dealt
from isotron.core.parallel.pipeline.actions import Schedule
from isotron.core.parallel.pipeline.runtime import Runtime
from isotron.core.parallel.plan import Layout, split_layers
from isotron.core.parallel.split import model_costs
from isotron.core.parallel.stage import Setup, Stage, build_stage

Saved = tuple[str, tuple[int, ...], list[tuple[Box, Tensor]]]


class ParallelModel:
    """`config`: a family's config with its vocabulary size known. `layout.dp` must be known.

    `frozen`: patterns of names of parameters that are not trained.
    """

    def __init__(
        self,
        config: Any,
        layout: Layout,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        frozen: tuple[str, ...] = (),
    ) -> None:
        if layout.vpp > 1 and layout.pp == 1:
            asked = f"--vpp {layout.vpp} --pp 1"
            raise refuse(asked, "chunks are dealt to pipeline ranks, and there is one", "--vpp 1, or --pp 2 or more")
        if hasattr(config, "check_layout"):
            config.check_layout(layout)
        self.config, self.layout, self.mesh = config, costed(config, layout), mesh
        self.dtype, self.device = dtype, device
        split = split_layers(config.num_layers, layout, model_costs(config))
        setup = Setup(config, split, layout, mesh, dtype, device, seed, frozen)
        self.stages: dict[int, Stage] = {}
        for s, holder in enumerate(layout.placement):
            if holder == mesh.coordinate["pp"]:
                self.stages[s] = build_stage(setup, s, self.stages)
        self._tables: dict[tuple[int, bool], Schedule] = {}
        keep = layout.recompute_keep if layout.recompute == "full" else None
        # ranks that are dealt documents may end at different times: nothing of the reduction starts before the end
        overlap = layout.overlap_grad_reduce and (layout.in_rounds or not layout.hybrid_context_parallel)
        self.runtime = Runtime(self.stages, mesh.group("pp"), overlap, keep)

    def table(self, microbatches: int, forward_only: bool = False) -> Schedule:
        """What this rank executes in its row of a step, or of an evaluation."""
        key = microbatches, forward_only
        if key not in self._tables:
            sizes = {number: stage.gathered_elements for number, stage in self.stages.items()}
            sums = {number: stage.summed_elements for number, stage in self.stages.items()}
            self._tables[key] = self.layout.table(microbatches, forward_only, sizes, sums)
        return self._tables[key]

    def count_parameters(self) -> int:
        """Elements of the whole model, each logical parameter once, without padding; counted over the ranks."""
        views = [v for stage in self.stages.values() for v in stage.flat.saved_views()]
        own = sum(box.size for v in views for box, _ in v.pieces(v.weight))
        return int(comm.all_reduce(torch.tensor(own, device=self.device), self.mesh.group(*AXES)))

    def forward_backward(self, batches: Sequence[Batch], weight: float, scale: float = 1.0) -> dict[str, Tensor]:
        """Gradients of weight x (sum of token losses), summed over the whole layout; per-term sums of this rank.

        `scale`: of the loss as a whole, for terms that are means over sequences.
        """
        sequences = self.count_rows(batches)
        for stage in self.stages.values():
            stage.module.sequence_weight = scale / sequences
            stage.module.train()
            stage.flat.begin()
        terms = self.runtime.run(self.table(len(batches)), self.local(batches), weight)
        for stage in self.stages.values():
            stage.flat.finish_reduce()
        self._sum_ties()
        return terms

    def _sum_ties(self) -> None:
        """Gradients of what several stages hold; in the order of their names, for ranks may meet over several."""
        found = [(s.placed[name].name, name, s.flat) for s in self.stages.values() for name in s.flat.ties]
        for _, name, flat in sorted(found, key=lambda tie: tie[0]):
            flat.sum_tie(name)

    @torch.no_grad()
    def forward_only(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Per-term sums of this rank as in training, dropout and all, without gradients."""
        for stage in self.stages.values():
            stage.module.train()
        return self.runtime.run(self.table(len(batches), forward_only=True), self.local(batches), 1.0)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Per-term sums of this rank without gradients."""
        for stage in self.stages.values():
            stage.module.eval()
        return self.runtime.run(self.table(len(batches), forward_only=True), self.local(batches), 1.0)

    def local(self, batches: Sequence[Batch]) -> list[Batch]:
        """This context-parallel rank's slots of whole rows."""
        cp = self.mesh.group("cp")
        return [b if b.part is not None else local_batch(b, cp.index, cp.size, self._depths) for b in batches]

    def deal(self, batches: Sequence[Batch]) -> list[Batch]:
        """This rank's microbatches of a whole global batch, under dynamic context parallelism."""
        layout, group = self.layout, self.mesh.group("cp", "dp")
        given = layout.hybrid_costs
        costs = Costs(*given) if given else document_costs(self.config)
        most = layout.max_seqlen_per_dp_cp_rank or -(-batches[0].shape[1] // layout.cp)
        unit = layout.tp if layout.sequence_parallel else 1
        every = (
            getattr(self.config, "num_experts", 0) > 0
        )  # experts count every token, also of documents without a loss
        return dealt(batches, group.index, group.size, most, costs, unit, every, layout.in_rounds, self._depths)

    @property
    def _depths(self) -> int:
        """Of predictions further ahead."""
        return int(getattr(self.config, "mtp_num_layers", 0))

    def count_rows(self, batches: Sequence[Batch]) -> int:
        """Rows of the global batch of which these are this rank's microbatches."""
        origin = batches[0].origin
        return sum(len(b.tokens) for b in batches) * self.mesh.sizes["dp"] if origin is None else origin.rows

    def views(self) -> list[View]:
        """What this rank's optimizer steps."""
        return [v for stage in self.stages.values() for v in stage.flat.views()]

    def gather_weights(self) -> None:
        """After the optimizer: current weights to every data-parallel rank."""
        for stage in self.stages.values():
            stage.flat.start_gather(self.layout.overlap_param_gather)

    def wait_weights(self) -> None:
        """Block until every weight is current."""
        for stage in self.stages.values():
            stage.flat.wait_weights()

    def weight_pieces(self) -> Iterator[Saved]:
        """(name, global shape, [(global box, tensor)]) of the weights that this rank alone saves."""
        self.wait_weights()
        for stage in self.stages.values():
            for view in stage.flat.saved_views():
                yield view.placed.name, view.placed.rule.shape, list(view.pieces(view.weight))

    def buffer_pieces(self) -> Iterator[Saved]:
        """The same for what is no parameter and yet belongs to the model, in float32 or wider."""
        owns = all(self.mesh.coordinate[axis] == 0 for axis in ("tp", "cp", "dp"))
        for stage in self.stages.values():
            for name, rule in stage.buffers.items():
                pieces = [(whole(rule.shape), stage.module.get_buffer(name))] if owns else []
                yield name, rule.shape, pieces

    @property
    def wide(self) -> torch.dtype:
        """The type of gradients, masters and buffers."""
        return torch.promote_types(self.dtype, torch.float32)

    def count_tokens(self, batches: Sequence[Batch]) -> float:
        """Unmasked tokens of a step over all ranks; looks at data only, whole rows that all cp ranks have, or what
        they were dealt.
        """
        total = torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in batches]).sum()
        axes = ("cp", "dp") if any(b.part is not None for b in batches) else ("dp",)
        return float(comm.all_reduce(total.to(self.device), self.mesh.group(*axes)))

    def sum_terms(self, terms: dict[str, Tensor], names: Sequence[str]) -> list[float]:
        """Each term summed over all ranks once, the same on every rank."""
        local = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if self.mesh.coordinate["tp"] == 0:
            for i, name in enumerate(names):
                local[i] = terms.get(name, 0.0)
        return comm.all_reduce(local, self.mesh.group(*AXES)).tolist()
