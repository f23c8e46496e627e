"""What a server counts, in the text format of Prometheus."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from isotron.serve.worker import Worker

OUTCOMES = ("answered", "refused", "cancelled", "failed")


@dataclass
class Counters:
    """Requests by how they ended."""

    begun: int = field(default_factory=lambda: int(time.time()))
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str) -> None:
        """One request more."""
        with self.lock:
            self.requests[outcome] += 1


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.is_file() else 0


def render(counters: Counters, worker: Worker) -> str:
    """Every metric with its type."""
    lines = ["# TYPE isotron_requests_total counter"]
    lines += [f'isotron_requests_total{{outcome="{name}"}} {n}' for name, n in counters.requests.items()]
    scheduler = worker.engine.scheduler
    values: list[tuple[str, str, int]] = [
        ("generated_tokens_total", "counter", worker.generated),
        ("prompt_tokens_total", "counter", worker.prompted),
        ("answers_pending", "gauge", worker.pending),
    ]
    if scheduler is not None:
        values += [
            ("rows_running", "gauge", len(scheduler.running)),
            ("rows_waiting", "gauge", len(scheduler.waiting)),
            ("cache_pages", "gauge", scheduler.pages.count),
            ("cache_pages_used", "gauge", scheduler.pages.used),
            ("cache_pages_remembered", "gauge", scheduler.pages.remembered),
            ("prefix_tokens_reused_total", "counter", scheduler.pages.hits),
        ]
    for name, kind, value in values:
        lines += [f"# TYPE isotron_{name} {kind}", f"isotron_{name} {value}"]
    lines += ["# TYPE process_resident_memory_bytes gauge", f"process_resident_memory_bytes {resident_bytes()}"]
    return "\n".join(lines) + "\n"
