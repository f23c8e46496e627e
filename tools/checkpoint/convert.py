"""Convert checkpoints between formats: the same as `isotron convert`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from isotron.cli import main  # noqa: E402  the repository's own package, installed or not

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
