#!/usr/bin/env bash
# Everything worth knowing about one GPU in under six minutes: what it is, the GPU test tier, a training run with MFU,
# and the same few steps on GPU and CPU. Results go to $OUT (default: gpu-results/); quote them in docs/gpu.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
OUT="${OUT:-gpu-results}"
mkdir -p "$OUT"
export PYTHONPATH="$PWD"

"$PYTHON" -m isotron doctor --json > "$OUT/doctor.json"
"$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider | tee "$OUT/tests.txt" || true

run() { # NAME OPTIONS...: 30 steps on made-up data; the metrics stay
  local name="$1"
  shift
  "$PYTHON" -m isotron train --mock-data --vocab-size 32000 --train-iters 30 --eval-iters 0 --log-interval 10 \
    --no-tensorboard --save "$OUT/$name" "$@" | tee "$OUT/$name.txt"
  rm -rf "$OUT/$name"/step_*
}

run mfu-1b --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --num-key-value-heads 8 --ffn-hidden-size 5632 \
  --seq-length 4096 --micro-batch-size 4 --global-batch-size 8 --dtype bfloat16 --device cuda
run small-gpu --preset llama-tiny --seq-length 128 --global-batch-size 8 --dtype float32 --device cuda
run small-cpu --preset llama-tiny --seq-length 128 --global-batch-size 8 --dtype float32 --device cpu

"$PYTHON" - "$OUT" <<'PY'
import json, pathlib, statistics, sys

out = pathlib.Path(sys.argv[1])
read = lambda name: [r for r in map(json.loads, (out / name / "metrics.jsonl").open()) if "loss" in r]
big, gpu, cpu = (read(n) for n in ("mfu-1b", "small-gpu", "small-cpu"))
late = big[10:]
print("MFU", statistics.median(r["mfu"] or 0 for r in late), "tokens/s", statistics.median(r["tokens_per_s"] for r in late))
print("largest relative loss difference, GPU against CPU:", max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(gpu, cpu)))
PY
