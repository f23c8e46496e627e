"""Training speed beside the same model in `transformers`, interleaved in one run with the machine's matmul rate.

    python benchmarks/train_speed.py [--dtype float32|bfloat16] [--rounds 3] [--json]

Model: hidden 512, 8 layers, 8 heads, 4 key/value heads, FFN 1408, vocabulary 32000, sequence 512, microbatch 4; AdamW.
Each contender has a process of its own, as its users start it: `isotron train` sets the C library's heap and how
threads wait, a plain loop does not; `transformers-heap` is the plain loop with both too. They take turns, a step each;
times are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from isotron import birth
from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
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
        return train_step(model, optimizer, schedule, [batch]).loss

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
    """Forward and backward, matrix products only; of attention the half that a causal mask leaves."""
    c = CONFIG
    layer = c.hidden_size * (c.num_attention_heads + 2 * c.kv_heads) * c.head_size
    layer += c.hidden_size * c.num_attention_heads * c.head_size + 3 * c.hidden_size * c.ffn
    layer += c.num_attention_heads * c.head_size * SEQUENCE  # scores and their sums over S/2 keys: 2 x S/2 x H x N
    per_token = 6 * (c.num_layers * layer + c.hidden_size * c.vocab_size)
    return float(per_token * ROWS * SEQUENCE)


def peak_gib() -> float:
    """The most memory this process has had (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 2**20


class Contender:
    """A process that takes a step when told, and says what it took."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        words = ["--contender", name.removesuffix("-heap"), "--dtype", args.dtype, "--threads", str(args.threads)]
        env = {name: value for name, value in os.environ.items() if name != birth.VARIABLE}
        env |= {} if name == "transformers" else birth.settings(env)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, __file__, *words], stdin=pipe, stdout=pipe, text=True, env=env)
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.peak = 0.0

    def step(self, i: int) -> None:
        """Step i."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the contender has no pipes")
        print(i, file=self.process.stdin, flush=True)
        seconds, cpu, self.peak = json.loads(self.process.stdout.readline())
        self.seconds.append(seconds)
        self.cpu.append(cpu)


def contend(name: str, dtype: torch.dtype) -> None:
    """A contender's process: a step for each line of stdin."""
    step = {"isotron": ours, "transformers": theirs, "matmul": lambda dtype: lambda i: matmul_rate(dtype)}[name](dtype)
    for line in sys.stdin:
        cpu, start = time.process_time(), time.perf_counter()
        found = step(int(line))
        seconds = found if name == "matmul" else time.perf_counter() - start
        print(json.dumps([seconds, time.process_time() - cpu, peak_gib()]), flush=True)


def main() -> None:
    """Interleave, print medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--contender", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.contender:
        contend(args.contender, getattr(torch, args.dtype))
        return
    names = ("matmul", "isotron", "transformers", "transformers-heap")
    contenders = {name: Contender(name, args) for name in names}
    for i in range(args.rounds + 2):
        for contender in contenders.values():
            contender.step(i)
    rate = statistics.median(contenders.pop("matmul").seconds[2:])
    limit = ROWS * SEQUENCE * rate / step_flops()
    result: dict[str, object] = {"dtype": args.dtype, "matmul_gflops": rate / 1e9, "matmul_limit_tokens_per_s": limit}
    for name, c in contenders.items():
        speed = ROWS * SEQUENCE / statistics.median(c.seconds[2:])  # the first two warm up
        measured = {"tokens_per_s": speed, "of_matmul_rate": speed / limit, "cpu_s": statistics.median(c.cpu[2:])}
        result[name] = {**measured, "peak_gib": c.peak}
    print(json.dumps(result, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
