"""What the ranks of the Hugging Face tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isotron.core.mesh import Mesh
from isotron.core.parallel.plan import Layout
from isotron.hub.live import from_hf, stream, to_hf
from isotron.inference.config import inference_layout
from isotron.inference.engine import Engine
from isotron.train.verify import Case

PROMPTS = [[5, 17, 99, 3, 42, 8, 130, 1, 2, 9], [7, 7, 19]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "TP4": {"tp": 4},
}


def imported(directory: Path, layout: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    """A directory's model in a layout, with a padded vocabulary."""
    cut = Layout(**{"dp": 1, **layout}, make_vocab_size_divisible_by=32)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(rank, tp=cut.tp, dp=cut.dp, pp=cut.pp)
    return from_hf(directory, cut, mesh, dtype)


def exported(source: Path, result: Path, layout: dict[str, Any]) -> list[str]:
    """Read into a layout and write again; the names that `stream` gives on this rank."""
    model = imported(source, layout)
    to_hf(model, result, like=source)
    return [name for name, _ in stream(model)]


def generated(source: Path, layout: dict[str, Any], count: int) -> list[list[int]]:
    """Greedy tokens."""
    cut = inference_layout(Layout(**{"dp": 1, **layout}))
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = from_hf(source, cut, Mesh(rank, tp=cut.tp, pp=cut.pp))
    return Engine(model).generate(PROMPTS, count, stop_ids=()).tokens


def case_of(model: Any, layout: dict[str, Any]) -> Case:
    """Two steps of four samples of 32 tokens, in float64."""
    cut = Layout(**{"dp": 1, **layout}, make_vocab_size_divisible_by=8, ddp_bucket_size=3000)
    return Case(model, cut, sequence=32, micro_batch=2, global_batch=4, steps=2)
