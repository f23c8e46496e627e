#!/usr/bin/env bash
# Fine-tune a pre-trained model; says what to use until the verb is built.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m isotron finetune "$@"
