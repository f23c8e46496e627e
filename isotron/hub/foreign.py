"""What `--load` may name beside our own checkpoints: a Hugging Face directory or a Megatron checkpoint. PURE.

Torch is loaded only where tensors are asked for.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from isotron.hub.folder import is_folder, open_folder
from isotron.hub.megatron.args import read_config
from isotron.hub.megatron.ask import is_megatron, scan, step_directory


def is_foreign(path: str | Path) -> bool:
    """Whether a directory is one of theirs."""
    return is_folder(path) or is_megatron(path)


def foreign_source(path: str | Path, check_head: bool = True) -> Any:
    """Its tensors under our names, as a `TensorSource` that can be closed; refuses what does not match its config."""
    if is_folder(path):
        return import_module("isotron.hub.reader").HFSource(path, check_head=check_head)
    return import_module("isotron.hub.megatron.source").MegatronSource(path)


def foreign_model(path: str | Path) -> tuple[Any, str, Path | None]:
    """Its model config, the dtype of its weights, and the directory of its tokenizer where it may have one."""
    if is_folder(path):
        folder = open_folder(path)
        return folder.model, folder.dtype, folder.path
    scanned = scan(step_directory(path).resolve())
    dtype = next((s.dtype for n, s in scanned.tensors.items() if n.endswith("word_embeddings.weight")), "float32")
    return read_config(scanned.args, f"the Megatron checkpoint {path}"), dtype, None


def optimizer_left(source: Any) -> str:
    """How a foreign checkpoint keeps an optimizer's state that its source does not give: empty where there is none."""
    kinds = {"tensors": "masters and moments", "buckets": "flat buckets", "ranks": "files of ranks"}
    return kinds.get(getattr(getattr(source, "scanned", None), "state", ""), "")
