"""Modes of activation memory: the same numbers as one process that keeps everything, and fewer bytes, as planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from isotron.core.mesh import Mesh
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.nn.block import PreNormBlock
from isotron.core.parallel.keep import shared_inputs
from isotron.core.parallel.plan import Layout
from isotron.planner.activations import stage_bytes
from isotron.train.verify import Case, measure
from tests.context_matrix import MODELS as LONG
from tests.matrix import faults, reference_of
from tests.ranks.test_planner_activations import check, job_of, saved

MODES: dict[str, dict[str, Any]] = {
    "block": {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "mlp": {"recompute": "selective", "recompute_modules": ("mlp",)},
    "mlp and norms": {"recompute": "selective", "recompute_modules": ("mlp", "layernorm")},
    "norms": {"recompute": "selective", "recompute_modules": ("layernorm",)},
    "probabilities": {"recompute": "selective", "recompute_modules": ("core_attn",)},
    "shares": {"recompute": "full", "distribute_saved_activations": True, "tp": 2},
    "shares of several blocks": {
        "recompute": "full", "distribute_saved_activations": True, "tp": 2, "recompute_num_layers": 2,
    },
}  # fmt: skip
GPT = GPTConfig(3, 32, 4, vocab_size=131, max_position_embeddings=16)
LLAMA = LlamaConfig(3, 32, 4, 2, 16, 48, 131, 16)
LATENT = LONG["latent"]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_numbers(ranks: Callable[..., list[Any]], mode: str) -> None:
    layout = Layout(**{"dp": 1, "make_vocab_size_divisible_by": 8, **MODES[mode]})
    case = Case(LLAMA if mode == "shares" else GPT, layout, 16, 2, 4, steps=2)
    assert not faults(ranks(layout.world, measure, case)[0], reference_of(case))


def test_a_norm_that_two_projections_form_again(ranks: Callable[..., list[Any]]) -> None:
    """Its gradient comes in two parts, and a bucket in which it is the last to come waits for the second."""
    layout = Layout(dp=2, zero=0, recompute="selective", make_vocab_size_divisible_by=8, ddp_bucket_size=3000)
    case = Case(LATENT, layout, 16, 1, 4, steps=1)
    assert not faults(ranks(2, measure, case)[0], reference_of(case))


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_each_part_of_an_mlp_adds_to_its_gradients(ranks: Callable[..., list[Any]], model: Any, zero: int) -> None:
    """16 slots in 3 parts; every weight is a bucket, whose sum over the ranks waits for the last part."""
    layout = Layout(dp=2, zero=zero, mlp_chunks=3, make_vocab_size_divisible_by=8, ddp_bucket_size=300)
    case = Case(model, layout, 16, 1, 4, steps=1)
    assert not faults(ranks(2, measure, case)[0], reference_of(case))


def measure_unsaid(case: Case) -> str:
    """The error where an MLP in parts does not say that it adds several times."""
    with patch.object(PreNormBlock, "_in_chunks", lambda block: ()):
        try:
            measure(case)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_gradient_that_comes_after_its_sum_has_begun_is_an_error(ranks: Callable[..., list[Any]]) -> None:
    layout = Layout(dp=2, mlp_chunks=3, make_vocab_size_divisible_by=8, ddp_bucket_size=300)
    said = ranks(2, measure_unsaid, Case(LLAMA, layout, 16, 1, 4, steps=1))
    assert all("came after its sum over data-parallel ranks had begun" in text for text in said), said


# gated and plain MLPs, explicit probabilities in the second
PLANNED = [*(("gpt-tiny", mode) for mode in MODES), ("llama-tiny", "mlp and norms"), ("llama-tiny", "block"),
           ("bert-tiny", "mlp")]  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), PLANNED)
def test_the_planned_bytes(ranks: Callable[..., list[Any]], name: str, mode: str) -> None:
    layout = Layout(**{"dp": 1, "make_vocab_size_divisible_by": 1, **MODES[mode]})
    job = job_of(name, layout, "bfloat16", 0.1 if name == "gpt-tiny" and layout.tp == 1 else 0.0)
    units = job.config.num_layers // layout.recompute_num_layers
    # shares are packed before the measurement sees them
    shares = units * job.tokens * job.config.hidden_size * 2 / layout.tp if layout.distribute_saved_activations else 0
    for found in ranks(layout.world, saved, job):
        check(job, [(stage, measured + shares) for stage, measured in found])


def shares_of(elements: int) -> list[int]:
    """Elements that this rank keeps of a tensor, and whether it comes back whole."""
    group = Mesh(dist.get_rank(), tp=dist.get_world_size()).group("tp")
    x = torch.arange(float(elements)).view(-1, 1).requires_grad_()
    with shared_inputs(group):
        y = x.exp()
    kept = y.grad_fn._raw_saved_result.data[0].numel()  # type: ignore[union-attr]
    (dx,) = torch.autograd.grad(y.sum(), x)
    return [kept, int(torch.equal(dx, y))]


def test_a_rank_keeps_its_share(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(2, shares_of, 7) == [[4, 1], [4, 1]]


def test_each_mode_keeps_less_than_the_one_before() -> None:
    """A GPT-3-shaped layer with unfused attention: selective spares at least 70 % of it, full at least half of that."""
    config = GPTConfig(1, 12288, 96, vocab_size=51200, max_position_embeddings=2048)
    job = replace(job_of("gpt-tiny", Layout(dp=1, tp=8, sequence_parallel=True), "bfloat16", 0.1),
                  config=config, seq=2048, micro_batch=1)  # fmt: skip

    def kept(**changes: Any) -> float:
        return stage_bytes(job.with_layout(**changes), 1, False, False)

    everything, selective, full = kept(recompute="none"), kept(recompute="selective"), kept(recompute="full")
    assert selective < 0.3 * everything and full < 0.5 * selective
