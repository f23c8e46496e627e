"""Training speed beside the same model in `transformers`, interleaved in one run with the machine's matmul rate.

    python benchmarks/train_speed.py [--dtype float32|bfloat16] [--rounds 3] [--json]

Model: hidden 512, 8 layers, 8 heads, 4 key/value heads, FFN 1408, vocabulary 32000, sequence 512, microbatch 4; AdamW.
Times are medians of interleaved steps; peak memory is that of a process of its own for each contender.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.core.precision.scaler import LossScaler
from isotron.train.step import train_step

CONFIG = LlamaConfig(8, 512, 8, 4, ffn_hidden_size=1408, vocab_size=32000, max_position_embeddings=512)
ROWS, SEQUENCE = 4, 512


def tokens(step: int) -> torch.Tensor:
    """Rows of random ids, the same for every contender."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, CONFIG.vocab_size, (ROWS, SEQUENCE + 1), generator=generator)


def ours(dtype: torch.dtype) -> Callable[[int], float]:
    """One isotron step."""
    layout = Layout(dp=1)
    model = ParallelModel(CONFIG, layout, Mesh(), dtype, torch.device("cpu"), 1)
    optimizer = make_optimizer(model, OptimConfig())
    schedule = ScheduleConfig(lr=1e-4, lr_decay_style="constant")
    positions = torch.arange(SEQUENCE).expand(ROWS, -1)

    def step(i: int) -> float:
        t = tokens(i)
        batch = Batch(t[:, :-1], t[:, 1:], torch.ones(ROWS, SEQUENCE), positions, torch.arange(ROWS))
        return train_step(model, optimizer, LossScaler(1.0, dynamic=False), schedule, [batch]).loss

    return step


def theirs(dtype: torch.dtype) -> Callable[[int], float]:
    """One step of the same model in transformers with a plain loop: clipping and fused AdamW."""
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    c = CONFIG
    config = HFConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.ffn, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.kv_heads, max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(i: int) -> float:
        t = tokens(i)
        # rows already carry their labels; transformers shifts inside, so it is given the S+1 tokens' first S positions
        optimizer.zero_grad(set_to_none=True)
        out = model(input_ids=t[:, :-1], labels=t[:, :-1], shift_labels=t[:, 1:].contiguous())
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(out.loss.detach())

    return step


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a square product of 2048, best of 3."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    best = min(_time(lambda: a @ b) for _ in range(3))
    return float(2 * 2048**3 / best)


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def step_flops() -> float:
    """Forward and backward, matrix products only."""
    c = CONFIG
    layer = c.hidden_size * (c.num_attention_heads + 2 * c.kv_heads) * c.head_size
    layer += c.hidden_size * c.num_attention_heads * c.head_size + 3 * c.hidden_size * c.ffn
    per_token = 6 * (c.num_layers * layer + c.hidden_size * c.vocab_size)
    return float(per_token * ROWS * SEQUENCE)


def peak_gib() -> float:
    """The most memory this process has had (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 2**20


def peak_alone(name: str, args: argparse.Namespace) -> float:
    """GiB of a process that runs one contender only, the interpreter and torch included."""
    words = ["--only", name, "--rounds", "1", "--dtype", args.dtype, "--threads", str(args.threads), "--json"]
    done = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["peak_gib"])


def main() -> None:
    """Interleave, print medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    makers = {"isotron": ours, "transformers": theirs}
    contenders = {n: make(dtype) for n, make in makers.items() if args.only in ("", n)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    rates = []
    for step in contenders.values():
        step(0)
    for i in range(1, args.rounds + 1):
        rates.append(matmul_rate(dtype))
        for name, step in contenders.items():
            before = time.process_time()
            times[name].append(_time(lambda step=step, i=i: step(i)))
            cpu[name].append(time.process_time() - before)
    rate = statistics.median(rates)
    limit = ROWS * SEQUENCE * rate / step_flops()
    peaks = {args.only: peak_gib()} if args.only else {name: peak_alone(name, args) for name in makers}
    result: dict[str, object] = {"dtype": args.dtype, "matmul_gflops": rate / 1e9, "matmul_limit_tokens_per_s": limit}
    for name in contenders:
        speed = ROWS * SEQUENCE / statistics.median(times[name])
        measured = {"tokens_per_s": speed, "of_matmul_rate": speed / limit, "cpu_s": statistics.median(cpu[name])}
        result[name] = {**measured, "peak_gib": peaks[name]}
    if args.only:
        result["peak_gib"] = peaks[args.only]
    print(json.dumps(result, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
