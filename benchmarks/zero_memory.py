"""Peak memory per rank and speed of ZeRO 0 to 3 beside FSDP2 and DeepSpeed, two processes on gloo, interleaved.

    python benchmarks/zero_memory.py [--rounds 3] [--contenders isotron-3 shard-3 fsdp2] [--json]

`isotron-N`: our model at stage N. `shard-N`: the model of transformers in `isotron.core.shard`. `fsdp2`: the same model
in torch's `fully_shard`, block by block. `deepspeed-N`: the same in DeepSpeed on its CPU accelerator, where it is
installed. Steps take turns; medians. Memory is the peak of a process that has one contender alone, over what it had
when everything was imported; the larger of the two ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isotron.core.batch import Batch
from isotron.core.engine.shard import shard
from isotron.core.mesh import Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.launch import close_all, run_ranks
from isotron.train.step import train_step

CONFIG = LlamaConfig(8, 384, 6, 6, ffn_hidden_size=1024, vocab_size=8192, max_position_embeddings=256)
ROWS, SEQUENCE, WORLD = 2, 256, 2
Step = Callable[[int], float]


def tokens(step: int) -> torch.Tensor:
    """Rows of random ids of this rank, the same for every contender."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    return torch.randint(0, CONFIG.vocab_size, (ROWS, SEQUENCE + 1), generator=generator)


def own_model(zero: int) -> Step:
    """Our model and loop."""
    mesh = Mesh(dist.get_rank(), dp=WORLD)
    layout = Layout(dp=WORLD, zero=zero, ddp_bucket_size=2_000_000)
    model = ParallelModel(CONFIG, layout, mesh, torch.float32, torch.device("cpu"), 1)
    optimizer = make_optimizer(model, OptimConfig())
    schedule = ScheduleConfig(lr=1e-4, lr_decay_style="constant")
    positions = torch.arange(SEQUENCE).expand(ROWS, -1)

    def step(i: int) -> float:
        t = tokens(i)
        batch = Batch(t[:, :-1], t[:, 1:], torch.ones(ROWS, SEQUENCE), positions, torch.arange(ROWS))
        loss = train_step(model, optimizer, schedule, [batch]).loss
        model.wait_weights()
        return loss

    return step


def transformers_model() -> torch.nn.Module:
    """The same sizes in transformers."""
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    c = CONFIG
    torch.manual_seed(1)
    return LlamaForCausalLM(
        Config(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.ffn, num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_attention_heads, num_key_value_heads=c.kv_heads, use_cache=False,
            max_position_embeddings=SEQUENCE, tie_word_embeddings=False, attn_implementation="sdpa",
        )
    )  # fmt: skip


def loss_of(model: Any, i: int) -> torch.Tensor:
    """Forward of this rank's rows."""
    t = tokens(i)
    found: torch.Tensor = model(input_ids=t[:, :-1], labels=t[:, :-1], shift_labels=t[:, 1:].contiguous()).loss
    return found


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Torch's fused one."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def sharded_module(zero: int) -> Step:
    """transformers' model in `shard`."""
    model = transformers_model()
    optimizer = adamw(model)
    sharded = shard(model, optimizer, zero=zero, bucket_size=2_000_000)

    def step(i: int) -> float:
        loss = loss_of(model, i)
        sharded.last_backward()
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def fsdp2() -> Step:
    """transformers' model in torch's sharding, a block at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = transformers_model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)

    def step(i: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, i)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def deepspeed(zero: int) -> Step:
    """transformers' model in DeepSpeed's engine."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank()), "LOCAL_SIZE": str(WORLD)}
    import deepspeed as theirs  # type: ignore[import-not-found, unused-ignore]

    model = transformers_model()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 2_000_000, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = theirs.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)

    def step(i: int) -> float:
        loss = loss_of(engine, i)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def made(name: str) -> Step:
    """One contender."""
    kind, _, stage = name.partition("-")
    if kind == "fsdp2":
        return fsdp2()
    return {"isotron": own_model, "shard": sharded_module, "deepspeed": deepspeed}[kind](int(stage))


def status(field: str) -> int:
    """Bytes of VmRSS or VmHWM (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def peak_alone(name: str) -> int:
    """Bytes of a contender's peak over three steps, on this rank."""
    torch.set_num_threads(1)
    transformers_model()  # imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = status("VmRSS")
    step = made(name)
    for i in range(3):
        step(i)
    return status("VmHWM") - before


def interleaved(names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender's steps, taking turns."""
    torch.set_num_threads(1)
    contenders = {name: made(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name, step in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            step(i)
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Run, print medians."""
    known = [f"{kind}-{zero}" for kind in ("isotron", "shard") for zero in range(4)] + ["fsdp2"]
    if importlib.util.find_spec("deepspeed") is not None:
        known += [f"deepspeed-{zero}" for zero in range(4)]
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", default=known)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    seconds = run_ranks(WORLD, interleaved, args.contenders, args.rounds, timeout=600)
    result = {}
    for name in args.contenders:
        close_all()  # a peak is that of new processes
        peak = max(run_ranks(WORLD, peak_alone, name, timeout=300))
        slowest = [max(pair) for pair in zip(*(rank[name] for rank in seconds), strict=True)]
        result[name] = {
            "tokens_per_s": WORLD * ROWS * SEQUENCE / statistics.median(slowest),
            "peak_mib_per_rank": peak / 2**20,
        }
    close_all()
    print(json.dumps(result, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
