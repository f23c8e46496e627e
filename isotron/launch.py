"""How isotron's processes come to be: in place, started on this machine, or joined (torchrun, Slurm).

`run_local` starts the processes of a command here; under torchrun or Slurm they exist already, and
`from_environment` says which one this is. Either way `init_distributed` brings them together. One process is one
process: no group is made. torch is imported only where a group is.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isotron.core.errors import refuse
from isotron.pool import Pool, RanksFailed, RanksLate, close_all, pool, run_ranks
from isotron.processes import check_platform, end_with_launcher, shutdown, stamp
from isotron.supervise import STORE_VARIABLE, run_local

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

JOIN_SECONDS = 600.0  # how long processes may take to find each other, however long a collective may wait later

__all__ = [
    "Pool",
    "RanksFailed",
    "RanksLate",
    "World",
    "check_platform",
    "close_all",
    "from_environment",
    "init_distributed",
    "pool",
    "run_local",
    "run_ranks",
    "shutdown",
    "stamp",
    "started_again",
]


@dataclass(frozen=True)
class World:
    """This process among all: `rank` of `size`, and among those on its machine: `local_rank` of `local_size`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def from_environment(environ: Mapping[str, str] | None = None) -> World | None:
    """The world that torchrun, `run_local` or Slurm put this process into; None where nobody did."""
    env = os.environ if environ is None else environ
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    # a batch script runs outside any step and has these variables too, but nobody started its peers
    in_batch_script = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env
    if "SLURM_PROCID" in env and not in_batch_script:
        return _from_slurm(env)
    return None


def init_distributed(world: World, device: torch.device, timeout: float = 600.0) -> None:
    """Joins all processes in the default group; `timeout` in seconds is how long a collective may wait for a peer.

    Does nothing for a world of one. Every attempt of an elastic restart meets under a prefix of its own: the keys of
    the attempt before it point to dead processes.
    """
    if world.size == 1:
        return
    from datetime import timedelta

    import torch.distributed as dist

    from isotron.core.device import activate, backend

    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher()
    activate(device)
    generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"isotron/generation{generation}", _store(world, timeout))
    dist.init_process_group(
        backend(device),
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
        device_id=device if device.type != "cpu" else None,
    )


def started_again(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun or Slurm has started this job before."""
    env = os.environ if environ is None else environ
    return any(_number(env, name, 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


# ---- who started this process --------------------------------------------------------------------------------------


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdigit():
        raise refuse(
            f"{name}={text if text is not None else '(unset)'} in the environment",
            "a process that was started by a launcher needs RANK and WORLD_SIZE as numbers (Slurm: SLURM_PROCID and "
            "SLURM_NTASKS)",
            "start it with torchrun or srun, or `unset RANK WORLD_SIZE` to let isotron start its own processes",
        )
    return int(text)


def _from_torchrun(env: Mapping[str, str]) -> World:
    size = _number(env, "WORLD_SIZE")
    return _checked(
        World(
            rank=_number(env, "RANK"),
            size=size,
            local_rank=_number(env, "LOCAL_RANK", 0),
            local_size=_number(env, "LOCAL_WORLD_SIZE", size if "LOCAL_RANK" in env else 1),
        )
    )


def _from_slurm(env: Mapping[str, str]) -> World:
    size = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size))
    node = _number(env, "SLURM_NODEID", 0)
    return _checked(
        World(
            rank=_number(env, "SLURM_PROCID"),
            size=size,
            local_rank=_number(env, "SLURM_LOCALID"),
            local_size=counts[node] if node < len(counts) else size,
        )
    )


def _checked(world: World) -> World:
    if world.rank >= world.size or world.local_rank >= world.local_size:
        raise refuse(
            f"rank {world.rank} of {world.size}, local rank {world.local_rank} of {world.local_size}",
            "ranks count from 0, so each must be below its world's size",
            "start the processes with torchrun or srun, which set RANK, WORLD_SIZE and LOCAL_RANK",
        )
    return world


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's short form `8(x2),4` written out: 8, 8, 4."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


def _first_host(nodes: str) -> str:
    """The first name of Slurm's short form `gpu[01-04,07]`: gpu01."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^\[,]*)", nodes)
    if match is None:
        return nodes
    prefix, ranges, suffix = match.groups()
    return prefix + (re.split(r"[,-]", ranges)[0] + suffix if ranges else "")


# ---- where the processes meet --------------------------------------------------------------------------------------


def _store(world: World, timeout: float) -> Store:
    """The key-value store of this world: a file for processes of one machine, else a port on the first one."""
    from datetime import timedelta

    import torch.distributed as dist

    path = os.environ.get(STORE_VARIABLE)
    if path:
        return dist.FileStore(path, world.size)
    host, port = _meeting_point(os.environ)
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        host,
        port,
        world.size,
        is_master=world.rank == 0 and not agent_has_it,
        timeout=timedelta(seconds=min(timeout, JOIN_SECONDS)),
        wait_for_workers=False,
    )


def _meeting_point(env: Mapping[str, str]) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT; under Slurm else the step's first host and a port made from the job's number."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    host = env.get("MASTER_ADDR") or (_first_host(nodes) if nodes else None)
    port = None
    with contextlib.suppress(KeyError, ValueError):
        port = 20000 + (int(env["SLURM_JOB_ID"]) + int(env.get("SLURM_STEP_ID", "0"))) % 20000
    port = _number(env, "MASTER_PORT", port) if host else None
    if host is None or port is None:
        raise refuse(
            "several processes without MASTER_ADDR and MASTER_PORT",
            "the processes meet at the first one's address, and the environment does not give it",
            "start them with torchrun or srun, or set MASTER_ADDR=localhost MASTER_PORT=29500",
        )
    return host, port
