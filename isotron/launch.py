"""How isotron's processes come to be: in place, started here, or joined (torchrun, Slurm)."""

from __future__ import annotations

from isotron.pool import Pool, RanksFailed, RanksLate, close_all, pool, run_ranks
from isotron.processes import check_platform

__all__ = ["Pool", "RanksFailed", "RanksLate", "check_platform", "close_all", "pool", "run_ranks"]
