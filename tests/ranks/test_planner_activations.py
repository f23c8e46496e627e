"""What the planner says a forward keeps is what autograd saves, per family, recompute mode, dtype and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isotron.config.schema import PRESETS
from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.split import halves_of
from isotron.planner import pairs
from isotron.planner.activations import stage_bytes
from isotron.planner.job import Job
from isotron.planner.parameters import stage_layers

TINY = [*(name for name in PRESETS if name.endswith("-tiny") and name != "t5-tiny"), "tiny-moe"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
B, S, V = 2, 64, 512


def job_of(name: str, layout: Layout, dtype: str, dropout: float, **model: Any) -> Job:
    config = replace(
        PRESETS[name],
        vocab_size=V,
        max_position_embeddings=S,
        num_layers=4,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        **model,
    )
    return Job(config, layout, S, B, B, dtype)


def saved(job: Job) -> list[tuple[int, float]]:
    """(stage, bytes saved by its forward of one microbatch), each storage once, parameters aside."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    axes = {"tp": job.layout.tp, "dp": job.dp, "pp": job.layout.pp}
    mesh = Mesh(dist.get_rank(), **axes) if world > 1 else Mesh()
    model = ParallelModel(job.config, job.layout, mesh, DTYPES[job.dtype], torch.device("cpu"), 1)
    rows = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(3))
    batch = Batch(rows[:, :-1], rows[:, 1:], torch.ones(B, S), torch.arange(S).expand(B, -1), torch.arange(B))
    return [(number, _of(stage, batch)) for number, stage in model.stages.items()]


def _of(stage: Any, batch: Batch) -> float:
    own = {p.untyped_storage().data_ptr() for p in stage.module.parameters()}
    kept: dict[int, int] = {}
    alive = []  # a freed storage's address must not come again

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            alive.append(x)
        return x

    stage.module.train()
    stage.flat.begin()
    boundary = {}
    if stage.number:
        shape, dtype = stage.boundary_shapes(batch, stage.number - 1)["hidden"]
        boundary = {"hidden": torch.randn(shape).to(dtype).requires_grad_()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = stage.module(batch, boundary, 1.0)
    del out
    return float(sum(kept.values()))


def check(job: Job, found: list[tuple[int, float]]) -> None:
    last = job.layout.stages - 1
    for stage, measured in found:
        held = halves_of(stage_layers(job.config, job.layout), stage)
        planned = stage_bytes(job, held, stage == 0, stage == last)
        # token ids are a view of rows that are one longer; a mask of positions is counted once per batch
        assert planned == pytest.approx(measured, rel=0.005), (job.layout, job.dtype, stage)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", TINY)
def test_one_process(name: str, recompute: str, dropout: float) -> None:
    dtype = "float32" if dropout == 0.0 and name == "llama-tiny" else "bfloat16"
    job = job_of(name, Layout(dp=1, recompute=recompute, make_vocab_size_divisible_by=1), dtype, dropout)
    check(job, saved(job))


E, T = 48, 20  # tokens of an encoder's row and of a decoder's


def pairs_of(recompute: str, dropout: float, dtype: str, **model: Any) -> Job:
    config = replace(PRESETS["t5-tiny"], vocab_size=V, max_position_embeddings=E, decoder_seq_length=T, **model,
                     hidden_dropout=dropout, attention_dropout=dropout)  # fmt: skip
    return Job(config, Layout(dp=1, recompute=recompute, make_vocab_size_divisible_by=1), E, B, B, dtype)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["relu", "gated-gelu"])
def test_an_encoder_and_a_decoder(kind: str, recompute: str) -> None:
    """What is formed again takes the padding, the biases and what the encoder gave with it, outside of autograd."""
    sizes = {"encoder_num_layers": 3, "decoder_num_layers": 2, "feed_forward_proj": kind}
    for dropout, dtype in ((0.1, "float32"), (0.0, "bfloat16")):
        job = pairs_of(recompute, dropout, dtype, **sizes)
        model = ParallelModel(job.config, job.layout, Mesh(), DTYPES[dtype], torch.device("cpu"), 1)
        draw = torch.Generator().manual_seed(3)
        tokens, labels, source = (torch.randint(0, V, (B, n), generator=draw) for n in (T, T, E))
        lengths, positions = torch.tensor([E, E - 5]), torch.arange(T).expand(B, -1)
        batch = Batch(
            tokens, labels, torch.ones(B, T), positions, torch.arange(B), source=source, source_lengths=lengths
        )
        beside = 0 if recompute == "none" else B * E + 4 * (E * E + T * T) * job.element
        beside += B * E * 64 * job.element if recompute == "full" else 0
        planned = pairs.stage_bytes(job, range(5), True, True)
        assert planned - beside == _of(model.stages[0], batch), (dropout, dtype)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("llama-tiny", {"softmax_type": "off-by-one"}),
        ("llama-tiny", {"softmax_type": "learnable"}),
        ("bert-tiny", {"norm_placement": "pre"}),
        ("tiny-moe", {"moe_norm_topk_prob": False}),
        ("tiny-moe", {"moe_router_load_balancing_type": "sinkhorn"}),
        ("tiny-moe", {"moe_router_score_function": "sigmoid", "moe_router_topk": 1}),
    ],
)
def test_softmaxes_norms_and_routers(name: str, model: dict[str, Any]) -> None:
    halves = name == "tiny-moe"  # of a microbatch keep what the whole does
    layout = Layout(dp=1, make_vocab_size_divisible_by=1, overlap_moe_expert_parallel_comm=halves)
    job = job_of(name, layout, "bfloat16", 0.0, **model)
    check(job, saved(job))


def test_a_wider_residual_stream() -> None:
    for name, recompute in zip((*TINY, "gpt-tiny", "llama-tiny"), cycle(("none", "selective", "full")), strict=False):
        dropout = 0.1 if name == "gpt-tiny" else 0.0
        layout = Layout(dp=1, recompute=recompute, make_vocab_size_divisible_by=1, fp32_residual_connection=True)
        placed = {"norm_placement": "pre"} if name == "bert-tiny" else {}  # norms on the stream give it their own type
        job = job_of(name, layout, "bfloat16", dropout, **placed)
        check(job, saved(job))


def test_units_of_several_blocks() -> None:
    job = job_of("llama-tiny", Layout(dp=1, recompute="full", recompute_num_layers=2), "bfloat16", 0.0)
    check(job, saved(job))


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True, "recompute": "full"},
        {"pp": 2},
        {"pp": 2, "recompute": "selective"},
    ],
)
def test_several_ranks(ranks: Callable[..., list[Any]], name: str, axes: dict[str, Any]) -> None:
    layout = Layout(**{"dp": 1, "make_vocab_size_divisible_by": 1, **axes})
    job = job_of(name, layout, "bfloat16", 0.0)
    for found in ranks(job.world, saved, job):
        check(job, found)


def each(jobs: list[Job]) -> list[list[tuple[int, float]]]:
    """What this rank's stages save, job by job."""
    return [saved(job) for job in jobs]


def test_blocks_that_are_cut(ranks: Callable[..., list[Any]]) -> None:
    """Every kind of block but those that cannot be, in every mode of recompute; units of a half and a whole block."""
    jobs = []
    for name in ("llama-tiny", "gemma2-tiny", "olmo2-tiny", "bert-tiny"):
        for mode in ({}, {"recompute": "selective"}, {"recompute": "full", "recompute_num_layers": 2}):
            layout = Layout(dp=1, pp=2, make_vocab_size_divisible_by=1, layers_per_stage=(1.5, 2.5), **mode)
            jobs.append(job_of(name, layout, "bfloat16", 0.1 if mode else 0.0))
    kept = Layout(dp=1, pp=2, make_vocab_size_divisible_by=1, layers_per_stage=(2.5, 1.5), recompute="full")
    jobs.append(job_of("gpt-tiny", replace(kept, recompute_method="block"), "bfloat16", 0.0))
    for rank in ranks(2, each, jobs):
        for job, found in zip(jobs, rank, strict=True):
            check(job, found)
