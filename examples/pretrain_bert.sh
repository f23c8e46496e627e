#!/usr/bin/env bash
# Pre-train BERT with the options of Megatron-LM; what they leave out is filled with Megatron's defaults (--defaults
# megatron: norms before attention and MLP, a tenth of the rows cut short), and printed. There is no second loss on pairs
# of sentences: it is Megatron's run with --bert-no-binary-head.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m isotron train --family bert --defaults megatron "$@"
