"""One rank of `isotron evaluate`: a model from a checkpoint, tasks on it, results printed by rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isotron.config.schema import RunConfig, changed
from isotron.core import device as devices
from isotron.core.checkpoint.format import read_manifest
from isotron.core.errors import refuse
from isotron.core.mesh import AXES, Mesh
from isotron.core.parallel.model import ParallelModel
from isotron.evaluate.model import ModelScorer
from isotron.evaluate.options import Asked
from isotron.evaluate.result import Result, table
from isotron.evaluate.tasks import evaluate
from isotron.hub.foreign import is_foreign
from isotron.hub.opened import ORIGIN
from isotron.inference.config import inference_layout
from isotron.inference.generate import find_step, find_tokenizer, foreign_tokenizer, loaded_model, with_sizes
from isotron.launch import World, from_environment, init_distributed, shutdown
from isotron.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model in a layout with its tokenizer. `begin`: what its own library puts before every text."""

    model: ParallelModel
    tokenizer: Tokenizer
    step: Path
    begin: tuple[int, ...]


def main(config: RunConfig, options: Mapping[str, Any]) -> int:
    """Run the tasks and print them on rank 0; returns the exit code."""
    world = from_environment() or World()
    config = in_layout(config, world)
    device = devices.resolve(config.train.device, world.local_rank)
    init_distributed(world, device)
    try:
        loaded = load(config, world, device)
        results = [one(loaded, config, options, name, path) for name, path in options["task"]]
        if world.rank == 0:
            print(_as_json(loaded.step, results) if options["json"] else table(results), flush=True)
        return 0
    finally:
        shutdown()


def in_layout(config: RunConfig, world: World) -> RunConfig:
    """The config without what only training needs; refuses a world of another size."""
    layout = replace(inference_layout(config.layout), dp=max(config.layout.dp, 1))
    if world.size != layout.world:
        asked = f"a layout of {layout.world} processes on {world.size}"
        raise refuse(asked, "--tp x --pp x --dp x --cp processes are needed", f"start {layout.world} processes")
    return changed(config, **{leaf: getattr(layout, leaf) for leaf in layout.__dataclass_fields__})


def load(config: RunConfig, world: World, device: Any) -> Loaded:
    """The model that `load` names, in the layout of the config."""
    layout = config.layout
    mesh = Mesh(world.rank, tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp)
    step = find_step(config.checkpoint.load, mesh.group(*AXES))
    foreign = is_foreign(step)
    tokenizer = foreign_tokenizer(config) if foreign else find_tokenizer(config, step, read_manifest(step))
    model = loaded_model(with_sizes(config, tokenizer), step, mesh, device)
    from_library = (step if foreign else step / ORIGIN).is_dir()
    return Loaded(model, tokenizer, step, tuple(tokenizer.prefix) if from_library else ())


def one(loaded: Loaded, config: RunConfig, options: Mapping[str, Any], name: str, path: str) -> Result:
    """One task."""
    scorer = ModelScorer(loaded.model, options["rows"])
    how = Asked(
        name, path, loaded.tokenizer, loaded.begin, config.data.seq_length,
        options["overlapping_eval"], options["strict_lambada"], options["limit"], options["json_keys"][0],
    )  # fmt: skip
    return evaluate(how, scorer)


def _as_json(step: Path, results: list[Result]) -> str:
    return json.dumps({"checkpoint": str(step), "results": [r.as_json() for r in results]}, ensure_ascii=False)
