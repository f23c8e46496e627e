#!/usr/bin/env bash
# Generate text from a checkpoint: --prompt TEXT (repeatable), or one prompt per line on stdin.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m isotron generate "$@"
