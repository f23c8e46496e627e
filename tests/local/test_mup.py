"""muP's coordinate check: what a step changes does not grow with the width; without muP it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isotron.core.mesh import Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.optim.build import make_optimizer, scale_initial
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.mup import initial_factor, rate_factor
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.train.step import train_step
from isotron.train.verify import Case, microbatches

WIDTHS = (64, 512)


def changes(width: int, cfg: OptimConfig) -> dict[str, float]:
    """Root mean square of what three steps change in the last hidden state and in the logits."""
    config = LlamaConfig(2, width, width // 16, 0, 16, 2 * width, vocab_size=97)
    layout = Layout(dp=1, make_vocab_size_divisible_by=1)
    model = ParallelModel(config, layout, Mesh(), torch.float32, torch.device("cpu"), 3)
    scale_initial(model, cfg)
    optimizer = make_optimizer(model, cfg)
    case = Case(config, layout, sequence=16, micro_batch=4, global_batch=4)
    batches = microbatches(case, 0, model.mesh.group("dp"))
    before = seen(model, batches)
    for _ in range(3):
        schedule = ScheduleConfig(lr=4e-3, lr_decay_style="constant", weight_decay=0.0)
        train_step(model, optimizer, schedule, batches)
    return {k: float((v - before[k]).square().mean().sqrt()) for k, v in seen(model, batches).items()}


@torch.no_grad()
def seen(model: ParallelModel, batches: Any) -> dict[str, torch.Tensor]:
    decoder = model.stages[0].module
    hidden = decoder.hidden(batches[0], {})
    return {"hidden": hidden, "logits": decoder.head.logits(decoder.norm(hidden))}


@pytest.mark.parametrize("method", ["adamw", "lion", "muon"])
def test_what_a_step_changes_does_not_grow_with_the_width(method: str) -> None:
    grown = {}
    for base in (0, WIDTHS[0]):
        cfg = OptimConfig(method, clip_grad=0.0, mup_base_hidden_size=base)
        small, large = (changes(width, cfg) for width in WIDTHS)
        grown[base] = {kind: large[kind] / small[kind] for kind in small}
    assert grown[0]["logits"] > 2.0, grown
    assert all(0.4 < ratio < 1.6 for ratio in grown[WIDTHS[0]].values()), grown


def test_factors() -> None:
    cfg = OptimConfig()
    assert initial_factor("layers.0.mlp.down.weight", (4, 8), 4.0) == 0.5
    assert initial_factor("head.weight", (9, 8), 4.0) == 0.25
    assert initial_factor("embed.weight", (9, 8), 4.0) == initial_factor("norm.weight", (8,), 4.0) == 1.0
    assert rate_factor("layers.0.mlp.down.weight", (4, 8), 4.0, "adamw", cfg) == 0.25
    assert rate_factor("layers.0.mlp.down.weight", (4, 8), 4.0, "muon", cfg) == 0.5
    assert rate_factor("layers.0.mlp.down.bias", (4,), 4.0, "lion", cfg) == 1.0
