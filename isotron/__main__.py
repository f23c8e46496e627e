"""`python -m isotron` is the command `isotron`."""

from __future__ import annotations

import sys

from isotron.cli import main

if __name__ == "__main__":
    sys.exit(main())
