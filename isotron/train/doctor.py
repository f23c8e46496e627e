"""`isotron doctor`: what this machine has, what its devices can do, and whether processes on it can talk.

Nothing optional is imported to find out whether it is there: a broken package must not break the report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from json import dumps
from typing import Any

from isotron import __version__
from isotron.launch import Pool

Report = dict[str, Any]

# distribution, module, what it is for
PACKAGES: tuple[tuple[str, str, str], ...] = (
    ("numpy", "numpy", "token files"),
    ("safetensors", "safetensors", "checkpoints"),
    ("tokenizers", "tokenizers", "Hugging Face tokenizers"),
    ("sentencepiece", "sentencepiece", "SentencePiece tokenizers"),
    ("tiktoken", "tiktoken", "tiktoken tokenizers"),
    ("tensorboard", "tensorboard", "curves in the run directory"),
    ("wandb", "wandb", "curves on Weights & Biases"),
    ("transformers", "transformers", "comparison with published models"),
    ("flash-attn", "flash_attn", "faster attention on Ampere and newer"),
    ("transformer-engine", "transformer_engine", "FP8 kernels on Ada and newer"),
    ("torchao", "torchao", "quantised weights"),
    ("triton", "triton", "fused GPU kernels"),
    ("faiss-cpu", "faiss", "retrieval indexes"),
)
SHOWN_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8", "float4")
SMALL_BYTES, LARGE_BYTES = 1024, 4 * 2**20


def run(json: bool = False) -> int:
    """Prints the report; the exit code is 1 where processes on this machine cannot talk to each other."""
    report = doctor()
    if json:
        print(dumps(report, indent=2))
    else:
        _show(report)
    return 0 if report["collectives"]["error"] is None else 1


def doctor(directory: str = ".") -> Report:
    """Everything that is known about this machine, ready for JSON; sizes in bytes, times in seconds."""
    import torch

    from isotron.core import device as dev

    disk = shutil.disk_usage(directory)
    return {
        "isotron": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_build": dev.build(),
        "system": platform.platform(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "devices": devices(),
        "packages": packages(),
        "collectives": collectives(),
        "disk": {"path": os.path.abspath(directory), "free_bytes": disk.free, "total_bytes": disk.total},
    }


def devices() -> list[Report]:
    """The CPU and every GPU, with what each can do in hardware, in software, or not at all."""
    import torch

    from isotron.core import device as dev

    found = [torch.device("cpu")]
    if (first := dev.resolve("auto")).type != "cpu":
        found += [torch.device(first.type, i) for i in range(dev.count())]
    return [_describe(device) for device in found]


def _describe(device: Any) -> Report:
    from isotron.core import device as dev

    able = dev.capabilities(device)
    name = dev.device_name(device)
    peaks = {dtype: dev.peak_flops(name, dtype) for dtype in SHOWN_DTYPES}
    return {
        "device": str(device),
        "name": name,
        "generation": able.generation,
        "backend": dev.backend(device),
        "memory_bytes": dev.total_memory(device),
        "dtypes": {dtype: dev.support(able, dtype) for dtype in SHOWN_DTYPES},
        "flash_attention": able.flash,
        "tf32": able.tf32,
        "peak_flops": {dtype: peak for dtype, peak in peaks.items() if peak is not None},
    }


def packages() -> list[Report]:
    """Libraries that isotron uses or can use: version, or None where one is not installed."""
    return [{"name": name, "version": _version(name, module), "use": use} for name, module, use in PACKAGES]


def _version(distribution: str, module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def collectives(processes: int = 2) -> Report:
    """Latency and bandwidth of an all-reduce between processes of this machine, on the way that a run takes there."""
    report: Report = {"backend": "gloo", "processes": processes, "error": None}
    report |= {"latency_s": None, "bytes": LARGE_BYTES, "bytes_per_s": None}
    workers = Pool(processes)
    try:
        small, large, way = workers.run(time_all_reduce, timeout=120.0)[0]
    except RuntimeError as error:  # reported, since to find such things is what this command is for
        return report | {"error": str(error)}
    finally:
        workers.close()
    return report | {"backend": way, "latency_s": small, "bytes_per_s": LARGE_BYTES / large}


def time_all_reduce(repeats: int = 5) -> tuple[float, float, str]:
    """Runs on every rank: the best seconds of an all-reduce of SMALL_BYTES and of LARGE_BYTES, and what carried it."""
    import torch
    import torch.distributed as dist

    from isotron.core import comm
    from isotron.core.mesh import Mesh

    group, best = Mesh(dist.get_rank(), dp=dist.get_world_size()).group("dp"), []
    for size in (SMALL_BYTES, LARGE_BYTES):
        x = torch.zeros(size // 4)
        times = []
        for _ in range(repeats):
            comm.barrier(group)
            start = time.perf_counter()
            comm.all_reduce(x, group)
            times.append(time.perf_counter() - start)
        best.append(min(times))
    return best[0], best[1], "gloo" if group.line is None else "shared memory"


# ---- for people ------------------------------------------------------------------------------------------------------


def _show(report: Report) -> None:
    """Lines of at most 80 columns where the names allow it: one property a line."""
    print(f"isotron {report['isotron']}, Python {report['python']}")
    print(f"torch {report['torch']} ({report['torch_build']})")
    print(report["system"])
    print(f"{report['cores']} cores, {report['threads']} threads")
    for device in report["devices"]:
        print("\n".join(_device_lines(device)))
    print("\npackages")
    for row in report["packages"]:
        print(f"  {row['name']:<19} {row['version'] or 'not installed':<15} {row['use']}")
    disk = report["disk"]
    print(f"\n{_talk(report['collectives'])}")
    print(f"disk at {disk['path']}: {_gigabytes(disk['free_bytes'])} free of {_gigabytes(disk['total_bytes'])}")


def _device_lines(row: Report) -> list[str]:
    """One device: its properties, and for each number type whether it computes in it."""
    marks = {"native": "yes", "emulated": "emulated", "refused": "no"}
    facts = {"name": row["name"], "generation": row["generation"], "memory": _gigabytes(row["memory_bytes"])}
    facts |= {dtype: marks[row["dtypes"][dtype]] for dtype in SHOWN_DTYPES}
    facts["flash attention"] = "yes" if row["flash_attention"] else "no"
    return ["", f"device {row['device']}", *(f"  {name:<19} {fact}" for name, fact in facts.items())]


def _talk(report: Report) -> str:
    who = f"{report['processes']} processes over {report['backend']}"
    if report["error"] is not None:
        return f"{who}: FAILED\n{report['error']}"
    rate = report["bytes_per_s"] / 1e9
    return f"{who}: all-reduce\n  {report['latency_s'] * 1e3:.2f} ms for 1 KB, {rate:.2f} GB/s for 4 MB"


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
