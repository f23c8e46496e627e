"""A crowd of clients on a server of this machine: latencies, and whether memory and cache come back.

    python benchmarks/serve_load.py [--clients 64] [--seconds 60]

A tiny model (what is measured is the server, not the arithmetic) on loopback. Of the requests a fifth have broken
bodies, a fifth are streams that the client drops midway; the rest must be answered. Ends with exit code 1 if anything
other than the right 4xx came back, or if rows, pages or memory do not return to where they were.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.serving import crowd, listening, make_server, settled  # noqa: E402

MEMORY = "process_resident_memory_bytes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with listening(make_server()) as address:
        crowd(address, given.clients, min(5.0, given.seconds))  # caches and pools of libraries are filled
        before = settled(address)
        found = crowd(address, given.clients, given.seconds)
        after = settled(address, 30.0)
    times = sorted(found.pop("latencies"))
    wrong = found.pop("wrong")
    report = {
        **found,
        "wrong": wrong[:10],
        "requests_per_s": round(sum(found.values()) / given.seconds, 1),
        "p50_ms": round(1e3 * times[len(times) // 2], 1),
        "p99_ms": round(1e3 * times[len(times) * 99 // 100], 1),
        "memory_before_mb": round(before[MEMORY] / 1e6, 1),
        "memory_after_mb": round(after[MEMORY] / 1e6, 1),
        "pages_used_after": after["isotron_cache_pages_used"],
        "rows_after": after["isotron_rows_running"] + after["isotron_rows_waiting"],
        "pending_after": after["isotron_answers_pending"],
    }
    print(json.dumps(report, indent=2))
    leaked = after[MEMORY] > before[MEMORY] + 100e6
    return int(bool(wrong) or leaked)


if __name__ == "__main__":
    sys.exit(main())
