#!/usr/bin/env bash
# Fine-tune a pre-trained model: its weights only, a new optimizer, step 0. What the line leaves out is read from the
# checkpoint (model, tokenizer, sequence length) or follows from the data (one pass), and is printed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m isotron finetune "$@"
