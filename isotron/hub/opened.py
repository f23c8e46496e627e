"""A model on disk, whatever its format: its config, its tensors under our names, and the files that belong to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isotron.core.checkpoint.load import Source, TensorSource
from isotron.core.checkpoint.locate import find
from isotron.core.checkpoint.weights import is_optimizer_state
from isotron.core.errors import refuse
from isotron.core.layout import Box, Ints
from isotron.hub.families import model_from_dict
from isotron.hub.folder import Folder, companions, is_folder, open_folder
from isotron.hub.megatron.ask import is_megatron
from isotron.hub.megatron.source import MegatronSource
from isotron.hub.reader import HFSource

ORIGIN = "hf"  # where a checkpoint keeps the config.json and other files that its model came with
DESCRIPTOR = "isotron_tokenizer.json"


@dataclass(frozen=True)
class Trained:
    """A run elsewhere: steps of its optimizer, samples it has consumed, and its arguments in Megatron's words."""

    updates: int
    consumed: int
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Opened:
    """`kept`: the config.json that the model came with. `tokens`: special tokens by their field in config.json.

    `files`: companions of the weights, by name. `close` lets go of files, reading opens them again. `trained`: the run
    that can be gone on with, where the source has its optimizer's state.
    """

    path: Path
    model: Any
    source: TensorSource
    dtype: str
    kept: Mapping[str, Any] | None
    tokens: Mapping[str, Any]
    files: tuple[Path, ...]
    weight_files: tuple[Path, ...]
    step: int
    close: Callable[[], None]
    trained: Trained | None = None


def open_model(path: str | Path, vocab_size: int = 0, state: bool = False) -> Opened:
    """A Hugging Face directory, a Megatron checkpoint, a run, or a step directory.

    `vocab_size`: real entries of a Megatron vocabulary that is padded; 0 means what its arguments say. `state`: with
    the state of a Megatron optimizer, where it can be read.
    """
    where = Path(path).expanduser()
    if is_folder(where):
        return _open_folder(open_folder(where))
    if is_megatron(where):
        return _open_megatron(where, vocab_size, state)
    step = find(where, lambda line: None, hashes=True) if where.is_dir() else None
    if step is None:
        case = "it is neither a checkpoint nor a Hugging Face directory (config.json with model.safetensors)"
        raise refuse(f"the model in {path}", case, "the directory of a run, of a step, or of a Hugging Face model")
    return _open_step(step)


def _open_folder(folder: Folder) -> Opened:
    source = HFSource(folder)
    files = tuple(sorted({stored.file for stored in source.stored.values()}))
    return Opened(
        folder.path, folder.model, source, folder.dtype, folder.values, {}, tuple(companions(folder.path)), files, 0,
        source.close,
    )  # fmt: skip


def _open_megatron(where: Path, vocab_size: int, state: bool) -> Opened:
    source = MegatronSource(where, vocab_size, state)
    scanned = source.scanned
    consumed = int(scanned.args.get("consumed_train_samples") or 0)
    trained = None if source.left_behind else Trained(scanned.updates, consumed, scanned.args)
    return Opened(
        scanned.path, source.model, source, source.dtype, None, {}, tuple(companions(where)), source.files,
        scanned.iteration, source.close, trained,
    )  # fmt: skip


class _Weights:
    """The weights of a checkpoint, without optimizer state."""

    def __init__(self, source: Source) -> None:
        self.inner = source

    def names(self) -> list[str]:
        """Names of the weights."""
        return [n for n in self.inner.names() if not is_optimizer_state(n)]

    def info(self, name: str) -> tuple[torch.dtype, Ints]:
        """Dtype and global shape."""
        return self.inner.info(name)

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Copy region `box` into `out`."""
        self.inner.read(name, box, out)


def _open_step(step: Path) -> Opened:
    inner = Source(step)
    config = inner.manifest.meta.get("config")
    if not isinstance(config, Mapping) or "model" not in config:
        raise refuse(
            f"the checkpoint {step}", "it holds no model config", "a checkpoint written by isotron train or convert"
        )
    source = _Weights(inner)
    dtype = str(inner.info(source.names()[0])[0]).removeprefix("torch.")
    origin, tokenizer = step / ORIGIN, step / "tokenizer"
    kept = (
        json.loads((origin / "config.json").read_text(encoding="utf-8")) if (origin / "config.json").is_file() else None
    )
    beside = {f.name: f for folder in (tokenizer, origin) if folder.is_dir() for f in companions(folder)}
    tokens: dict[str, Any] = {}
    if (tokenizer / DESCRIPTOR).is_file():
        stored = json.loads((tokenizer / DESCRIPTOR).read_text(encoding="utf-8"))
        tokens = {f"{role}_token_id": stored.get(role) for role in ("bos", "eos", "pad")}
        tokens["eos_token_id"] = stored.get("eos") if stored.get("eos") is not None else stored.get("eod")
    files = tuple(sorted(step / name for name in inner.manifest.files if name.endswith(".safetensors")))
    return Opened(
        step, model_from_dict(config["model"]), source, dtype, kept, tokens, tuple(beside.values()), files,
        inner.manifest.step, inner.close,
    )  # fmt: skip
