#!/usr/bin/env bash
# Pre-train a GPT or LLaMA model with the options of Megatron-LM; what they leave out is filled with Megatron's defaults
# (--defaults megatron), and printed. Processes are started here; under torchrun or Slurm use `isotron train` itself.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m isotron train --defaults megatron "$@"
