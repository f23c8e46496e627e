"""What the ranks of every command that reads a model share: the processes that there are, in a layout without training,
the checkpoint, and the end of it all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from isotron.config.schema import RunConfig, changed
from isotron.core import comm
from isotron.core import device as devices
from isotron.core.checkpoint.group import GroupRanks
from isotron.core.checkpoint.locate import find_together
from isotron.core.errors import refuse
from isotron.core.mesh import AXES, Group, Mesh
from isotron.hub.foreign import is_foreign
from isotron.inference.config import inference_layout
from isotron.launch import World, from_environment, init_distributed, shutdown

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Session:
    """One rank at work: `config` is in the layout of its mesh, `step` the step or foreign checkpoint to read."""

    config: RunConfig
    mesh: Mesh
    device: torch.device
    step: Path

    @property
    def speaks(self) -> bool:
        """Whether this rank prints."""
        return self.mesh.rank == 0


@contextmanager
def session(config: RunConfig, replicas: bool = False) -> Iterator[Session]:
    """Join the other ranks, find the checkpoint, and part from them at the end. `replicas`: dp is kept."""
    world = from_environment() or World()
    config = without_training(config, replicas)
    layout = config.layout
    if world.size != layout.world:
        asked = f"a layout of {layout.world} processes on {world.size}"
        raise refuse(asked, "it takes tp x pp x cp x dp of them", f"start {layout.world} processes")
    device = devices.resolve(config.train.device, world.local_rank)
    init_distributed(world, device)
    try:
        mesh = Mesh(world.rank, **layout.axes)
        yield Session(config, mesh, device, find_step(config.checkpoint.load, mesh.group(*AXES)))
    finally:
        shutdown()


def without_training(config: RunConfig, replicas: bool = False) -> RunConfig:
    """The config in the layout that is left when nothing is trained."""
    layout = inference_layout(config.layout)
    if replicas:
        layout = replace(layout, dp=max(config.layout.dp, 1))
    return changed(config, **{leaf: getattr(layout, leaf) for leaf in layout.__dataclass_fields__})


def find_step(path: str, world: Group, option: str = "--load") -> Path:
    """The step or foreign checkpoint to load, as rank 0 sees it; a step's files are hashed, each by one rank."""
    if comm.broadcast_json(is_foreign(path) if world.index == 0 else None, world):
        return Path(path)
    step = find_together(path, GroupRanks(world))
    if step is None:
        raise refuse(f"{option} {path}", "there is no complete checkpoint", f"{option} with the directory of a run")
    return step
