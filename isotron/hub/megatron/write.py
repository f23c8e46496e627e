"""Writing `torch_dist` checkpoints that Megatron loads in any layout: tensors in `.distcp` files, an index, arguments.

Tensors of blocks are stacked over layers there, one region for each layer; the vocabulary is padded with zeros.
"""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from isotron.core.checkpoint.disk import write_blocks
from isotron.core.checkpoint.files import dtype_name
from isotron.core.checkpoint.format import FileEntry
from isotron.core.checkpoint.load import TensorSource
from isotron.hub import export
from isotron.hub.megatron import archive, names
from isotron.hub.megatron.args import padded_vocabulary, write_args
from isotron.hub.megatron.assemble import layer_of
from isotron.hub.writer import Planned

# what keeps no number here, but is asked for when a model is loaded
EXTRA = ("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention",
         "mlp.linear_fc1", "mlp.linear_fc2")  # fmt: skip
CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
          "common_backend_version": 1}  # fmt: skip


class MegatronNames:
    """What `export.planned` asks of a spelling."""

    @staticmethod
    def tensors(cfg: Any) -> list[Any]:
        """Every tensor, ours and theirs."""
        return names.tensors(cfg)


def planned(
    source: TensorSource, cfg: Any, tp: int, dtype: torch.dtype | None, done: Callable[[], None]
) -> list[Planned]:
    """Every tensor of theirs, by the name with the number of its layer."""
    spelling: Any = MegatronNames
    rows = padded_vocabulary(cfg.vocab_size, tp)
    return [
        _padded(p, rows) if p.key in names.VOCABULARY else p for p in export.planned(source, cfg, spelling, dtype, done)
    ]


def _padded(tensor: Planned, rows: int) -> Planned:
    def make() -> Tensor:
        out = torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype)
        out[: tensor.shape[0]] = tensor.make()
        return out

    return Planned(tensor.key, tensor.dtype, (rows, *tensor.shape[1:]), make)


def _records(tensor: Planned) -> list[archive.Record]:
    """The archive of one tensor, with a dimension of one layer where it is stacked."""
    stacked = layer_of(tensor.key) is not None
    slot = archive.Slot("0", tensor.dtype, (1, *tensor.shape) if stacked else tensor.shape)
    return archive.records(slot, [(slot, lambda: tensor.make()[None] if stacked else tensor.make())])


def write_distcp(file: Path, tensors: Sequence[Planned]) -> FileEntry:
    """One file: the archives of its tensors one after the other."""
    return write_blocks(file, (block for t in tensors for block in archive.blocks(_records(t))))


def finish(work: Path, files: Mapping[str, Sequence[Planned]], cfg: Any, tp: int, pp: int) -> None:
    """Everything beside the tensors: the index, what layers keep beside weights, the arguments of a run."""
    dtype = dtype_name(next(iter(files.values()))[0].dtype)
    nothing = archive.records([None])
    objects = [f"decoder.layers.{part}._extra_state/shard_{i}_{cfg.num_layers}"
               for part in EXTRA for i in range(cfg.num_layers)]  # fmt: skip
    common = {"args": Namespace(**write_args(cfg, dtype, tp, pp)), "checkpoint_version": 3.0, "iteration": 0,
              "num_floating_point_operations_so_far": 0}  # fmt: skip
    contents: dict[str, Iterator[bytes | memoryview]] = {
        "__1_0.distcp": (block for _ in objects for block in archive.blocks(nothing)),
        ".metadata": iter([pickle.dumps(index(files, objects, archive.size_of(nothing), cfg.num_layers), 2)]),
        "common.pt": archive.blocks(archive.records(common)),
        "metadata.json": iter([json.dumps(CONFIG).encode()]),
    }
    for name, made in contents.items():
        (work / name).unlink(missing_ok=True)
        write_blocks(work / name, made)


def index(files: Mapping[str, Sequence[Planned]], objects: Sequence[str], each: int, layers: int) -> dcp.Metadata:
    """What torch's distributed checkpoints call metadata: the regions of every tensor, and where they lie."""
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for file, tensors in files.items():
        at = 0
        for t in tensors:
            layer, length = layer_of(t.key), archive.size_of(_records(t))
            name, first = (t.key, ()) if layer is None else (layer[1], (layer[0],))
            corner = torch.Size((*first, *(0 for _ in t.shape)))
            shape, region = ((layers, *t.shape), (1, *t.shape)) if first else (t.shape, t.shape)
            if name not in entries:
                properties = dcp.TensorProperties(dtype=t.dtype)
                entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
            entries[name].chunks.append(dcp.ChunkStorageMetadata(corner, torch.Size(region)))
            storage[dcp.MetadataIndex(name, corner)] = filesystem._StorageInfo(file, at, length)
            at += length
    for i, name in enumerate(objects):
        entries[name] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(name)] = filesystem._StorageInfo("__1_0.distcp", i * each, each)
    return dcp.Metadata(entries, None, storage)
