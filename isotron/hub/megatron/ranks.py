"""Writing legacy `torch` checkpoints: one file for each tensor- and pipeline-parallel rank, with its part of the model.

Layers are counted from 0 in every stage, and the last of several stages holds a copy of a tied embedding.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isotron.core.checkpoint.disk import write_blocks
from isotron.core.checkpoint.format import FileEntry
from isotron.core.checkpoint.load import TensorSource
from isotron.core.errors import Problem, Refused
from isotron.core.layout import Box
from isotron.core.models.hf_names import Mapped
from isotron.hub import export
from isotron.hub.megatron import archive, names
from isotron.hub.megatron.args import padded_vocabulary, refuse_unknown
from isotron.hub.megatron.assemble import layer_of
from isotron.hub.megatron.cut import part_shape, regions, uncut
from isotron.hub.writer import Planned

FILE = "model_optim_rng.pt"
EMBEDDING, HEAD = names.VOCABULARY
# names of norms where Megatron's own layers are used in place of Transformer Engine's fused ones
LOCAL = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def refuse_uncut(cfg: Any, tp: int, pp: int) -> None:
    """Refuse a model that Megatron has no arguments for, or whose heads, widths or layers the sizes do not divide."""
    refuse_unknown(cfg)
    asked, problems = f"--tp {tp} --pp {pp}", []
    bad = uncut((("num_query_groups", cfg.kv_heads), ("ffn_hidden_size", cfg.ffn)), tp)
    if bad:
        case = (
            f"tensor-parallel ranks hold whole groups of heads and equal widths; {tp} does not divide {', '.join(bad)}"
        )
        problems.append(Problem(asked, case, "--tp 1, or another divisor of both"))
    if cfg.num_layers % pp:
        case = f"a legacy checkpoint has equal stages, and the model {cfg.num_layers} layers"
        problems.append(Problem(asked, case, "--pp 1, or another divisor of the layers"))
    if problems:
        raise Refused(problems)


def directory_of(tp_rank: int, pp_rank: int, pp: int) -> str:
    """The directory of a rank."""
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")


def planned(
    source: TensorSource,
    cfg: Any,
    layout: tuple[int, int],
    dtype: torch.dtype | None,
    done: Callable[[], None],
    implementation: str,
) -> dict[str, list[Planned]]:
    """Every rank's file by name, with the parts of tensors in it."""
    tp, pp = layout
    gated = cfg.family not in ("gpt", "neox")
    found: dict[str, list[Planned]] = {}
    for stage in range(pp):
        held = [
            (mapped, _spelled(key, implementation))
            for mapped in names.tensors(cfg)
            for key in _held(mapped.runs[0].theirs, cfg, stage, pp)
        ]
        for rank in range(tp):
            part = _Part(source, cfg, dtype, done, rank, tp, gated)
            found[f"{directory_of(rank, stage, pp)}/{FILE}"] = [part.planned(mapped, key) for mapped, key in held]
    return found


def _held(name: str, cfg: Any, stage: int, pp: int) -> list[str]:
    """The names under which a stage holds a tensor: none, its own with the stage's number of the layer, or two."""
    layer, each, last = layer_of(name), cfg.num_layers // pp, stage == pp - 1
    if layer is not None:
        number, rest = layer
        inside = number // each == stage
        return [rest.replace("decoder.layers.", f"decoder.layers.{number % each}.", 1)] if inside else []
    if name.startswith("embedding."):
        copy = [HEAD] if name == EMBEDDING and cfg.tie_embeddings and pp > 1 and last else []
        return [*([name] if stage == 0 else []), *copy]
    return [name] if last else []


def _spelled(name: str, implementation: str) -> str:
    for fused, own in LOCAL.items() if implementation == "local" else ():
        name = re.sub(re.escape(fused), own, name)
    return name


class _Part:
    """Cuts tensors for one tensor-parallel rank; only its own rows and columns are read."""

    def __init__(self, source: TensorSource, cfg: Any, dtype: torch.dtype | None, done: Callable[[], None],
                 rank: int, tp: int, gated: bool) -> None:  # fmt: skip
        self.source, self.cfg, self.dtype, self.done = source, cfg, dtype, done
        self.rank, self.tp, self.gated = rank, tp, gated

    def planned(self, mapped: Mapped, key: str) -> Planned:
        """The part of one tensor, under the name `key`."""
        stored, shape = self.source.info(mapped.ours)
        name, kind = mapped.runs[0].theirs, self.dtype or stored
        if name in names.VOCABULARY:
            shape = (padded_vocabulary(self.cfg.vocab_size, self.tp), *shape[1:])
        boxes = regions(name, shape, self.tp, self.gated)[self.rank]

        def make() -> Tensor:
            made = torch.cat([self._read(mapped, box, kind) for box in boxes])
            self.done()
            return made

        return Planned(key, kind, part_shape(name, shape, self.tp), make)

    def _read(self, mapped: Mapped, box: Box, dtype: torch.dtype) -> Tensor:
        """A region of their tensor; rows beyond ours are padding of the vocabulary."""
        rows = self.source.info(mapped.ours)[1][0]
        real = max(0, min(box.shape[0], rows - box.offset[0]))
        if real == box.shape[0]:
            return export.gather(self.source, mapped, mapped.runs[0].theirs, box, dtype)
        out = torch.zeros(box.shape, dtype=dtype)
        if real:
            inside = Box(box.offset, (real, *box.shape[1:]))
            out[:real] = export.gather(self.source, mapped, mapped.runs[0].theirs, inside, dtype)
        return out


def write(file: Path, tensors: Sequence[Planned], args: Mapping[str, Any]) -> FileEntry:
    """One rank's file: its tensors by name, and the arguments of a run."""
    slots = [(archive.Slot(str(i), t.dtype, t.shape), t.make) for i, t in enumerate(tensors)]
    model = {t.key: slot for t, (slot, _) in zip(tensors, slots, strict=True)}
    value = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 0, "model": model,
             "num_floating_point_operations_so_far": 0}  # fmt: skip
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    return write_blocks(file, archive.blocks(archive.records(value, slots)))
