"""What the ranks of the tests of experts run: checkpoints in which every expert is one number, and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from isotron.core import comm
from isotron.core.checkpoint.group import GroupRanks
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.save import Saved, save_checkpoint
from isotron.core.checkpoint.weights import load_weights
from isotron.core.mesh import AXES, Mesh
from isotron.core.nn.grouped import Groups
from isotron.core.nn.mlp import GatedMLP
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.hub.live import to_hf
from isotron.inference.config import inference_layout
from isotron.inference.engine import Engine
from isotron.train.verify import Case, microbatches, randomise


def build(config: Any, layout: dict[str, Any]) -> ParallelModel:
    """A model in a layout."""
    cut = Layout(**{"dp": 1, **layout}, make_vocab_size_divisible_by=1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return ParallelModel(config, cut, Mesh(rank, **cut.axes), torch.float32, torch.device("cpu"), 3)


def number_of(config: Any, name: str, rows: Tensor) -> Tensor:
    """The number of the expert whose these rows of a parameter are: block, matrix and expert in one."""
    block = int(name.split(".")[1])
    if name.endswith("gate_up.weight"):
        expert, up = rows // (2 * config.expert_width), rows // config.expert_width % 2
        return 1.0 + 100 * block + expert + 0.25 * up
    return -(1.0 + 100 * block + rows // config.hidden_size)


def saved_as_numbers(config: Any, layout: dict[str, Any], directory: Path) -> str:
    """Every expert one number; a checkpoint and a Hugging Face directory of it."""
    model = build(config, layout)
    for stage in model.stages.values():
        for view in stage.flat.held():
            for box, part in view.pieces(view.weight, owned=False):
                if ".experts." in view.placed.name:
                    rows = torch.arange(box.offset[0], box.offset[0] + box.shape[0])
                    part.copy_(number_of(config, view.placed.name, rows)[:, None].expand(box.shape))
    tensors = [Saved(n, torch.float32, shape, pieces) for n, shape, pieces in model.weight_pieces()]
    to_hf(model, directory / "hf")
    ranks = GroupRanks(model.mesh.group(*AXES))
    return str(save_checkpoint(directory / "run", 1, tensors, {}, ranks))


def wrong_numbers(config: Any, layout: dict[str, Any], step: str) -> tuple[list[str], int]:
    """Read in a layout: what is not its expert's number, and how many elements of experts are here."""
    model, wrong, seen = build(config, layout), [], 0
    load_weights(model, Source(Path(step)))
    for stage in model.stages.values():
        for view in stage.flat.held():
            for box, part in view.pieces(view.weight, owned=False):
                if ".experts." in view.placed.name:
                    seen += part.numel()
                    rows = torch.arange(box.offset[0], box.offset[0] + box.shape[0])
                    if not torch.equal(part, number_of(config, view.placed.name, rows)[:, None].expand(box.shape)):
                        wrong.append(f"{view.placed.name} at {box.offset}")
    return wrong, seen


def generated(config: Any, layout: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of a model with random weights."""
    cut = inference_layout(Layout(**{"dp": 1, **layout}))
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = ParallelModel(config, cut, Mesh(rank, **cut.axes), torch.float64, torch.device("cpu"), 3)
    randomise(model, 11)
    return Engine(model).generate(prompts, 8, stop_ids=()).tokens


def moved_bytes(config: Any, layout: dict[str, Any]) -> list[tuple[str, int]]:
    """What the groups of experts send in one block's forward and backward: (function, elements of this rank)."""
    model, calls = build(config, layout), []
    group = model.mesh.group("etp", "ep")
    real = comm.start_all_to_all

    def watched(flat: Tensor, sends: Any, receives: Any, of: Any) -> Any:
        if of is group and flat.dim() == 2:
            calls.append(("all_to_all", flat.numel()))
        return real(flat, sends, receives, of)

    with patch.object(comm, "start_all_to_all", watched):
        case = Case(config, model.layout, sequence=16, global_batch=4)
        batches = microbatches(case, 0, model.mesh.group("dp"))
        model.forward_backward(batches[:1], 1.0)
    return calls


class _Watched:
    """A transfer that notes when it is waited for."""

    def __init__(self, pending: comm.Pending, end: str, events: list[str]) -> None:
        self.pending, self.end, self.events = pending, end, events

    def wait(self) -> Tensor:
        self.events.append(self.end)
        return self.pending.wait()


def order_of_work(config: Any, layout: dict[str, Any]) -> list[str]:
    """What the only block of a model does in a forward and backward: "0+" a transfer sets out, "0-" it is waited for,
    "experts" and "shared" compute."""
    model, events = build(config, layout), []
    group = model.mesh.group("etp", "ep")
    start, spans, shared = comm.start_all_to_all, Groups.spans, GatedMLP.forward

    def start_and_note(flat: Tensor, sends: Any, receives: Any, of: Any) -> Any:
        pending = start(flat, sends, receives, of)
        if of is not group or flat.dim() != 2:
            return pending
        number = sum(event.endswith("+") for event in events)
        events.append(f"{number}+")
        return _Watched(pending, f"{number}-", events)

    def compute(self: Groups, *widths: int, like: Tensor) -> Any:
        events.append("experts")
        return spans(self, *widths, like=like)

    def compute_shared(self: GatedMLP, x: Tensor, *rest: Any) -> Tensor:
        events.append("shared")
        y = shared(self, x, *rest)
        y.register_hook(lambda dy: events.append("shared"))
        return y

    with (
        patch.object(comm, "start_all_to_all", start_and_note),
        patch.object(Groups, "spans", compute),
        patch.object(GatedMLP, "forward", compute_shared),
    ):
        case = Case(config, model.layout, sequence=16, global_batch=4)
        model.forward_backward(microbatches(case, 0, model.mesh.group("dp"))[:1], 1.0)
    return events
