"""`isotron plan --calibrate FILE`: the rates of the machine at hand, as a file that `--gpu FILE` reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from isotron.core.errors import refuse

SECONDS = 0.3  # of repeating one measurement
TYPES = ("float32", "bfloat16")


def write(path: str, processes: int = 2) -> list[str]:
    """Measures, writes the file, and returns what to print."""
    if not path.endswith(".toml"):
        raise refuse(f"--calibrate {path}", "the file is written as TOML", "--calibrate machine.toml")
    found = measure(processes)
    lines = [f"# measured by isotron plan --calibrate on {date.today().isoformat()}", f"[{Path(path).stem}]"]
    lines += [
        f"{name} = {value!r}" if not isinstance(value, str) else f'{name} = "{value}"' for name, value in found.items()
    ]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [*lines[2:], f"written: {path}; isotron plan --gpu {path} uses it"]


def measure(processes: int = 2) -> dict[str, Any]:
    """Rates of one device, in the units of the planner's data file (TFLOP/s, TB/s, GB/s, GiB)."""
    import torch

    from isotron.core import device as devices
    from isotron.train.doctor import collectives

    device = devices.resolve("auto")
    on_device = devices.is_cuda(device)
    size, count = (8192, devices.count()) if on_device else (1024, processes)
    rates = {t: matmul_rate(torch, device, devices.synchronize, t, size) / 1e12 for t in TYPES}
    memory = devices.total_memory(device) or 8 << 30
    report = collectives(processes)
    if report["error"]:
        raise refuse("--calibrate", f"the processes could not talk: {report['error']}", "isotron doctor", exit_code=1)
    # an all-reduce sends and receives 2 (n-1)/n of its bytes
    link = report["bytes_per_s"] * 2 * (processes - 1) / processes / 1e9
    return {
        "board": "",
        "memory": round(memory / (1 << 30) / (1 if on_device else processes), 2),
        "bandwidth": round(copy_rate(torch, device, devices.synchronize, 1 << (30 if on_device else 26)) / 1e12, 4),
        "node": max(1, count),
        "inner": round(link, 3),
        "outer": round(link, 3),
        "context": 2.0 if on_device else 0.3,
        "year": date.today().year,
        "peak": round(rates["float32"], 4),
        "peak_bfloat16": round(rates["bfloat16"], 4),
    }


def matmul_rate(torch: Any, device: Any, synchronize: Callable[[Any], None], dtype: str, size: int) -> float:
    """FLOP/s of a square matrix product."""
    a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    return 2.0 * size**3 / _best(lambda: torch.mm(a, a), lambda: synchronize(device))


def copy_rate(torch: Any, device: Any, synchronize: Callable[[Any], None], size: int) -> float:
    """Bytes/s read and written by a copy."""
    a = torch.ones(size // 4, device=device)
    b = torch.empty_like(a)
    return 2.0 * size / _best(lambda: b.copy_(a), lambda: synchronize(device))


def _best(work: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Seconds of the fastest of several calls."""
    work()
    wait()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - start)
    return best
