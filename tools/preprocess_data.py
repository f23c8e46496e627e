"""Tokenize JSON lines into .bin/.idx files, with the options of Megatron-LM: the same as `isotron preprocess`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from isotron.cli import main  # noqa: E402  the repository's own package, installed or not

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
