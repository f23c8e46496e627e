"""Peak memory of ranks that build a model of which nobody can hold the whole.

    python benchmarks/sharded_build.py [--preset llama2-7b] [--ranks 8] [--dtype bfloat16] [--layers 0] [--json]

Weights are drawn on the ranks that hold them under ZeRO-3; no optimizer is made. Of every rank: bytes of its weights,
the peak of its resident memory while it builds and what is left when it has built, over what it had when everything
was imported, and the sum of squares of its weights, as a sign that they were written. The weights are frozen, for
gradients in float32 would take twice their room. The exit code says whether every peak was below half of the whole.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from isotron.config.schema import PRESETS
from isotron.core import device as devices
from isotron.core.mesh import Mesh
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.launch import close_all, run_ranks
from isotron.planner.parameters import count_parameters


def status(field: str) -> int:
    """Bytes of VmRSS or VmHWM (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def built(preset: str, layers: int, dtype: str) -> dict[str, float]:
    """What building takes on this rank."""
    torch.set_num_threads(1)
    config = PRESETS[preset]
    config = replace(config, num_layers=layers) if layers else config
    mesh = Mesh(dist.get_rank(), dp=dist.get_world_size())
    layout = Layout(dp=dist.get_world_size(), zero=3)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before, start = status("VmRSS"), time.perf_counter()
    model = ParallelModel(config, layout, mesh, devices.dtype_of(dtype), torch.device("cpu"), 1, ("*",))
    seconds = time.perf_counter() - start
    peak, left = status("VmHWM") - before, status("VmRSS") - before
    weights = [stage.flat.weights for stage in model.stages.values()]
    total = sum(float(part.float().square().sum()) for w in weights for part in w.split(1 << 24))
    return {"weights": sum(w.nbytes for w in weights), "peak": peak, "left": left, "squares": total, "seconds": seconds}


def main() -> None:
    """Build, print, judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="llama2-7b", choices=PRESETS)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--layers", type=int, default=0, help="blocks instead of the preset's; 0 means all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = run_ranks(args.ranks, built, args.preset, args.layers, args.dtype, timeout=1500)
    close_all()
    config = PRESETS[args.preset]
    config = replace(config, num_layers=args.layers) if args.layers else config
    whole = count_parameters(config) * devices.dtype_of(args.dtype).itemsize
    result = {
        "whole_gb": whole / 1e9,
        "ranks": [
            {name: n / 1e9 if name in ("weights", "peak", "left") else n for name, n in r.items()} for r in found
        ],
        "largest_peak_gb": max(r["peak"] for r in found) / 1e9,
    }
    print(json.dumps(result, indent=None if args.json else 2))
    raise SystemExit(int(max(r["peak"] for r in found) > whole / 2 or not all(r["squares"] > 0 for r in found)))


if __name__ == "__main__":
    main()
