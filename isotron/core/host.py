"""What the machine itself says of its memory. PURE."""

from __future__ import annotations

from pathlib import Path


def available_memory(file: Path = Path("/proc/meminfo")) -> float | None:
    """Bytes that new processes of this machine can have; None where the system does not say."""
    if not file.exists():
        return None
    for line in file.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return None
