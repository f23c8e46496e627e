"""From our tensors to a Hugging Face directory: which are written, what config.json says, what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isotron.core.checkpoint.load import TensorSource
from isotron.core.errors import Refused, refuse
from isotron.core.layout import Box, Ints, whole
from isotron.core.models.hf_names import Mapped, entry_of
from isotron.hub.families import Spelling
from isotron.hub.folder import INDEX, SINGLE
from isotron.hub.reader import their_shapes
from isotron.hub.writer import Planned

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARD_BYTES = 5 * 10**9


def planned(
    source: TensorSource,
    cfg: Any,
    spelling: Spelling,
    dtype: torch.dtype | None = None,
    done: Callable[[], None] | None = None,
) -> list[Planned]:
    """Every tensor of theirs, to be filled from `source` (our names). `dtype` casts; `done()` follows each tensor."""
    found = []
    for mapped in spelling.tensors(cfg):
        stored, ours = source.info(mapped.ours)
        kind = dtype or stored
        for name, shape in their_shapes(mapped, ours).items():
            found.append(Planned(name, kind, shape, _maker(source, mapped, name, shape, kind, done)))
    return found


def _maker(
    source: TensorSource,
    mapped: Mapped,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    done: Callable[[], None] | None,
) -> Callable[[], Tensor]:
    def make() -> Tensor:
        out = made(source, mapped, name, shape, dtype)
        if done is not None:
            done()
        return out

    return make


def made(source: TensorSource, mapped: Mapped, name: str, shape: Ints, dtype: torch.dtype) -> Tensor:
    """Their tensor `name`, or all its entries, of `shape`, from ours."""
    of = [(entry_name, rows) for entry_name, rows in mapped.theirs().items() if entry_of(entry_name)[0] == name]
    if entry_of(of[0][0])[1] is None:
        out = gather(source, mapped, name, whole(shape[::-1] if mapped.transposed else shape), dtype)
        return out.t().contiguous() if mapped.transposed else out
    inner = shape[:0:-1] if mapped.transposed else shape[1:]
    out = torch.empty(shape, dtype=dtype)
    for i, (entry_name, _) in enumerate(of):
        part = gather(source, mapped, entry_name, whole(inner), dtype)
        out[i] = part.t() if mapped.transposed else part
    return out


def gather(source: TensorSource, mapped: Mapped, name: str, box: Box, dtype: torch.dtype) -> Tensor:
    """Rows of ours that are region `box` of their tensor `name`; the buffer starts as NaN, and none may be left."""
    out = torch.full(box.shape, torch.nan, dtype=dtype)
    start, stop = 0, box.offset[0] + box.shape[0]
    for run in mapped.runs:
        if run.theirs == name:
            low, high = (min(run.count, max(0, -((run.first - edge) // run.step))) for edge in (box.offset[0], stop))
            if low < high:
                region = Box((start + low, *box.offset[1:]), (high - low, *box.shape[1:]))
                rows = run.rows(low, high - low)
                at = slice(rows.start - box.offset[0], rows.stop - box.offset[0], run.step)
                source.read(mapped.ours, region, out[at])
        start += run.count
    refuse_nan(out, name)
    return out


def refuse_nan(out: Tensor, name: str) -> None:
    """A buffer that began as NaN was filled completely, with numbers."""
    if any(bool(torch.isnan(part).any()) for part in out.split(2**20)):
        raise refuse(
            f"the tensor {name}",
            "it holds NaN: the model has diverged, or a part of it was not written",
            "an earlier checkpoint",
            exit_code=1,
        )


def shard_names(count: int) -> list[str]:
    """File names as Hugging Face's libraries expect them."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def index_text(files: Mapping[str, Sequence[Planned]]) -> bytes:
    """The index of several files: total bytes, and the file of each tensor."""
    places = {t.key: name for name, tensors in files.items() for t in tensors}
    total = sum(t.bytes for tensors in files.values() for t in tensors)
    elements = sum(t.bytes // t.dtype.itemsize for tensors in files.values() for t in tensors)
    content = {
        "metadata": {"total_parameters": elements, "total_size": total},
        "weight_map": dict(sorted(places.items())),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def config_text(
    cfg: Any, spelling: Spelling, dtype: str, kept: Mapping[str, Any] | None, tokens: Mapping[str, Any]
) -> bytes:
    """config.json. `kept`: the one that the model came with, of which no field is dropped; `tokens`: ids by field."""
    fields = {
        "architectures": [spelling.ARCHITECTURE],
        "model_type": spelling.MODEL_TYPE,
        # written even when unknown: the defaults of a family may lie beyond the vocabulary of this model
        **({} if kept else dict.fromkeys(TOKENS)),
        **{k: v for k, v in tokens.items() if v is not None},
        **spelling.write_config(cfg),
    }
    if kept:
        fields = {**fields, **_written(kept, fields)} if _same(cfg, spelling, kept) else {**kept, **fields}
    fields["dtype"] = fields["torch_dtype"] = dtype
    return (json.dumps(fields, indent=2) + "\n").encode()


def _same(cfg: Any, spelling: Spelling, kept: Mapping[str, Any]) -> bool:
    """Whether the kept config still describes the model; then its fields stay as they were spelled."""
    try:
        return bool(spelling.read_config(kept, "config.json") == cfg)
    except Refused:
        return False


def _written(kept: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The kept fields, but for nulls where the other spelling has a value."""
    return {k: v for k, v in kept.items() if v is not None or ours.get(k) is None}


def extra_files(companions: Sequence[Path], tokens: Mapping[str, Any]) -> dict[str, bytes | Path]:
    """What lies beside the weights: tokenizer and generation config, the latter made when there is none."""
    files: dict[str, bytes | Path] = {path.name: path for path in companions}
    given = {k: v for k, v in tokens.items() if v is not None}
    if given and "generation_config.json" not in files:
        files["generation_config.json"] = (json.dumps({"_from_model_config": True, **given}, indent=2) + "\n").encode()
    if "tokenizer_config.json" not in files and ("tokenizer.json" in files or "vocab.json" in files):
        kind = "PreTrainedTokenizerFast" if "tokenizer.json" in files else "GPT2TokenizerFast"
        files["tokenizer_config.json"] = (json.dumps({"tokenizer_class": kind}, indent=2) + "\n").encode()
    return files


__all__ = [
    "INDEX",
    "SHARD_BYTES",
    "config_text",
    "extra_files",
    "gather",
    "index_text",
    "made",
    "planned",
    "shard_names",
]
