"""The planner's bytes of weights, gradients, masters and moments are those that a real build allocates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isotron.config.schema import PRESETS
from isotron.core.mesh import Mesh
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.config import OptimConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.planner.job import Job
from isotron.planner.memory import states
from isotron.planner.parameters import count_parameters, rank_stages

TINY = [name for name in PRESETS if name.endswith("-tiny")]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALL = {"make_vocab_size_divisible_by": 8, "ddp_bucket_size": 9000}


def job_of(name: str, layout: Layout, dtype: str, optim: OptimConfig | None = None, **model: Any) -> Job:
    if name == "deepseek-v3-tiny":
        model = {"moe_layer_freq": "[0]+[1]*4", **model}
    blocks = {"encoder_num_layers": 3} if name == "t5-tiny" else {"num_layers": 5}
    config = replace(PRESETS[name], vocab_size=101, max_position_embeddings=32, **blocks, **model)
    return Job(config, layout, 32, 1, 8, dtype, optim=optim or OptimConfig())


def real(job: Job) -> dict[str, Any]:
    """Bytes that this rank allocates, parameters by name, and elements of the whole model."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh(dist.get_rank(), **job.layout.axes) if world > 1 else Mesh()
    frozen = job.optim.freeze
    model = ParallelModel(job.config, job.layout, mesh, DTYPES[job.dtype], torch.device("cpu"), 1, frozen)
    optim = make_optimizer(model, job.optim)
    away = sum(f.hosted.nbytes + f.hosted_grads.nbytes for f in (stage.flat for stage in model.stages.values()))
    flats = [stage.flat for stage in model.stages.values()]

    def size(tensors: list[torch.Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    return {
        "at": (mesh.coordinate["pp"], mesh.coordinate["tp"], mesh.group("cp", "dp").index),
        "weights": size([f.weights for f in flats]),
        "gradients": size([f.grads for f in flats]),
        "masters": optim.nbytes("master", host=False),
        "moments": optim.nbytes(host=False) - optim.nbytes("master", host=False),
        "host": optim.nbytes(host=True) + away,
        "names": {n: tuple(p.shard.shape) for s in model.stages.values() for n, p in s.placed.items()},
        "parameters": model.count_parameters(),
    }


def check(job: Job, found: dict[str, Any]) -> None:
    pp, tp, dp = found["at"]
    parts = rank_stages(job.config, job.layout, pp, tp, job.optim.freeze)
    planned = states(job, parts, dp, tp)
    for kind in ("weights", "gradients", "masters", "moments", "host"):
        assert getattr(planned, kind) == found[kind], (kind, job.layout, found["at"])
    assert {n: p.shard.shape for part in parts for n, p in part.placed.items()} == found["names"]
    assert count_parameters(job.config) == found["parameters"]


@pytest.mark.parametrize(("name", "dtype"), zip(TINY, cycle(DTYPES), strict=False))
def test_one_process_of_every_family(name: str, dtype: str) -> None:
    job = job_of(name, Layout(dp=1, **SMALL), dtype)
    check(job, real(job))


@pytest.mark.parametrize(
    ("name", "dtype", "axes"),
    [
        ("llama-tiny", "bfloat16", {"tp": 2, "pp": 2}),
        ("llama-tiny", "float32", {"tp": 2, "dp": 2, "sequence_parallel": True}),
        ("llama-tiny", "bfloat16", {"tp": 4}),  # more ranks than key/value heads
        ("gpt-tiny", "bfloat16", {"pp": 2, "dp": 2}),  # a tie over two stages
        ("gpt-tiny", "bfloat16", {"pp": 2, "dp": 2, "zero": 0}),
        ("gpt-tiny", "bfloat16", {"pp": 2, "dp": 2, "zero": 3}),
        ("llama-tiny", "bfloat16", {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True}),
        ("llama-tiny", "bfloat16", {"dp": 4, "zero": 2, "zero_shard_size": 2, "main_grads_dtype": "bfloat16"}),
        ("qwen3-tiny", "bfloat16", {"dp": 4, "zero": 3, "zero_shard_size": 2}),
        ("gpt-tiny", "bfloat16", {"dp": 2, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.3}),
        (
            "llama-tiny",
            "bfloat16",
            {"dp": 2, "zero": 3, "optimizer_cpu_offload": True, "offload_weights": True, "offload_gradients": True},
        ),
        ("gpt-tiny", "float16", {"pp": 2, "dp": 2, "schedule": "zbv"}),  # both ends on one rank
        ("gemma2-tiny", "float16", {"pp": 2, "dp": 2, "zero": 3, "layers_per_stage": (2.5, 2.5)}),
        ("deepseek-v3-tiny", "bfloat16", {"pp": 2, "vpp": 2, "layers_per_stage": (0.5, 1, 2, 1.5)}),
        ("qwen3-tiny", "bfloat16", {"tp": 2, "dp": 2, "sequence_parallel": True}),
        ("neox-tiny", "bfloat16", {"pp": 2, "vpp": 2, "dp": 2}),
        ("qwen2-tiny", "bfloat16", {"dp": 4}),
        ("phi3-tiny", "float64", {"dp": 3}),
        ("llama-tiny", "bfloat16", {"cp": 2, "dp": 2}),
        ("t5-tiny", "bfloat16", {"pp": 2, "dp": 2, "tp": 2, "zero": 2, "layer_split": "balanced"}),
    ],
)
def test_several_ranks(ranks: Callable[..., list[Any]], name: str, dtype: str, axes: dict[str, Any]) -> None:
    job = job_of(name, Layout(**{"dp": 1, **SMALL, **axes}), dtype)
    for found in ranks(job.world, real, job):
        check(job, found)


def test_the_fullest_rank_of_a_stage_with_experts_that_are_dealt_anew(ranks: Callable[..., list[Any]]) -> None:
    """Experts lie whole on every rank of tp 2 x dp 2, so that their shards go over all four; rows make them uneven."""
    job = job_of("tiny-moe", Layout(**{**SMALL, "tp": 2, "dp": 2, "etp": 1, "zero": 1}), "bfloat16", num_experts=3)
    built = ranks(4, real, job)
    for found in built:
        check(job, found)
    most = max(sum(found[kind] for kind in ("weights", "gradients", "masters", "moments")) for found in built)
    assert states(job, rank_stages(job.config, job.layout, 0)).states == most
    assert len({(found["masters"], found["moments"]) for found in built}) > 1


def state_of(found: dict[str, int]) -> tuple[int, ...]:
    """What is compared of a build for one optimizer after another."""
    return tuple(found[kind] for kind in ("weights", "gradients", "masters", "moments", "host"))


SGD, LION, MUON, FACTORED = (OptimConfig(optimizer=name) for name in ("sgd", "lion", "muon", "adafactor"))
RULES = (
    SGD,
    replace(SGD, sgd_momentum=0.0),
    replace(LION, exp_avg_dtype="bfloat16"),
    replace(MUON, exp_avg_dtype="int8"),
    replace(MUON, muon_others="adafactor"),
    FACTORED,
    OptimConfig(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="int8"),
    OptimConfig(exp_avg_dtype="int8", exp_avg_sq_dtype="int8", master_remainders=True),
    OptimConfig(freeze=("embed.*", "layers.1.*"), param_groups=("layers.0.*:optimizer=lion", "norm.*:optimizer=sgd")),
)


def every_rule(jobs: list[Job]) -> list[dict[str, Any]]:
    """The builds of this rank."""
    return [real(job) for job in jobs]


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("llama-tiny", {"tp": 2, "dp": 2, "zero": 1}),
        ("gpt-tiny", {"pp": 2, "dp": 2, "zero": 3}),
        ("tiny-moe", {"dp": 4, "ep": 2, "zero": 2}),
    ],
)
def test_every_rule_and_type_of_state(ranks: Callable[..., list[Any]], name: str, axes: dict[str, Any]) -> None:
    layout = Layout(**{"dp": 1, **SMALL, **axes})
    jobs = [job_of(name, layout, "bfloat16", optim) for optim in RULES]
    away = replace(layout, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    jobs += [job_of(name, away, "bfloat16", optim) for optim in (RULES[6], FACTORED)]
    for rank in ranks(4, every_rule, jobs):
        for job, found in zip(jobs, rank, strict=True):
            check(job, found)
    assert len({state_of(found) for found in rank}) == len(jobs)  # nothing is counted as something else
