"""What every process of `isotron train` runs: a file of its own, which the fork server loads once for all of them."""

from __future__ import annotations

from typing import Any

from isotron.config.schema import RunConfig
from isotron.launch import stamp
from isotron.planner.fit import out_of_memory
from isotron.train.main import main as train


def main(config: RunConfig, directory: str) -> int:
    """One rank of the run; memory that runs out on the way is refused like memory that is too small at the start."""
    try:
        return train(config, directory, tasks_of(config))
    except (RuntimeError, MemoryError) as error:
        refused = out_of_memory(config, error)
        if refused is None:
            raise
        refused.__dict__.update(error.__dict__)  # when it arose
        stamp(refused)
        raise refused from error


def tasks_of(config: RunConfig) -> Any:
    """What makes the tasks of each evaluation; None where the run has none."""
    if not config.train.eval_tasks:
        return None
    from isotron.evaluate.during import during

    return during
