"""Where the tensors of a Megatron checkpoint lie, as JSON on the standard output: the program of a confined process.

PURE. Called as `python -I -c ... DIRECTORY [state]`, where `state` asks for the optimizer's tensors too. It reads the
pickles of a `torch_dist` checkpoint (`.metadata`, `common.pt`, the few bytes before each tensor) or of legacy `torch`
files; the tensors themselves are not read.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import zipfile
from typing import Any

from isotron.hub.megatron.confine import confine
from isotron.hub.megatron.state import kind_of
from isotron.hub.megatron.unpickle import Inert, TensorPlace, UnsafeName, plain, read_pickle

# what is no weight, by the beginning of its names
OPTIMIZER = "optimizer.state."
STATE = ("optimizer.", "chained_", "rng_state", "rerun_state", "opt_param_scheduler", "dataloader", "content_metadata")


class Damaged(Exception):
    """A file that is not what it should be."""


class Window(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """As files do."""
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        """Bytes from the window's start."""
        return self.at

    def readinto(self, buffer: Any) -> int:
        """As files do."""
        want = max(0, min(len(buffer), self.length - self.at))
        self.file.seek(self.start + self.at)
        data = self.file.read(want)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


class Archive:
    """What `torch.save` wrote, at bytes [start, start + length) of a file."""

    def __init__(self, path: str, start: int = 0, length: int = -1) -> None:
        self.path, self.start = path, start
        self.file = open(path, "rb")  # noqa: SIM115  closed by `close`
        size = os.fstat(self.file.fileno()).st_size
        length = size - start if length < 0 else length
        if start < 0 or start + length > size:
            raise Damaged(f"{path} has {size} bytes, and a tensor would lie at {start}..{start + length}")
        try:
            self.zip = zipfile.ZipFile(Window(self.file, start, length))  # type: ignore[arg-type]
        except zipfile.BadZipFile as error:
            raise Damaged(f"{path} holds no archive of torch.save at byte {start}: {error}") from error
        self.prefix = next(n for n in self.zip.namelist() if n.endswith("data.pkl")).removesuffix("data.pkl")
        order = f"{self.prefix}byteorder"
        if order in self.zip.namelist() and self.zip.read(order) != b"little":
            raise Damaged(f"{path} was written on a machine with another order of bytes")

    def value(self) -> Any:
        """What was saved, with tensors as places."""
        return read_pickle(io.BytesIO(self.zip.read(f"{self.prefix}data.pkl")))

    def place(self, tensor: TensorPlace) -> int:
        """The byte of the file at which a tensor begins."""
        entry = self.zip.getinfo(f"{self.prefix}data/{tensor.key}")
        if entry.compress_type != zipfile.ZIP_STORED or not tensor.contiguous:
            raise Damaged(f"{self.path} holds a tensor that is packed or not in a row")
        self.file.seek(self.start + entry.header_offset)
        header = self.file.read(30)
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return self.start + entry.header_offset + 30 + names + tensor.offset * width(tensor.dtype)

    def close(self) -> None:
        """Let go of the file."""
        self.zip.close()
        self.file.close()


def width(dtype: str) -> int:
    """Bytes of an element."""
    return 1 if dtype == "bool" else int("".join(c for c in dtype.split("_")[0] if c.isdigit())) // 8


def described(archive: Archive, tensor: TensorPlace, directory: str) -> list[Any]:
    """[dtype, shape, file, first byte]."""
    file = os.path.relpath(archive.path, directory)
    return [tensor.dtype, list(tensor.shape), file, archive.place(tensor)]


def scan_dist(directory: str, state: bool) -> dict[str, Any]:
    """A `torch_dist` checkpoint: global tensors in chunks."""
    with open(os.path.join(directory, ".metadata"), "rb") as f:
        metadata = read_pickle(f)
    tensors: dict[str, dict[str, Any]] = {}
    for name, entry in metadata.state["state_dict_metadata"].items():
        wanted = not name.startswith(STATE) or (state and name.startswith(OPTIMIZER))
        if wanted and isinstance(entry, Inert) and entry.origin.endswith("TensorStorageMetadata"):
            tensors[name] = {"shape": list(entry.state["size"]), "chunks": []}  # type: ignore[attr-defined]
    for index, place in metadata.state["storage_data"].items():
        name = index.state["fqn"]
        if name not in tensors:
            continue
        if place.state.get("transform_descriptors"):
            raise Damaged(f"{name} is stored packed")
        file = os.path.normpath(os.path.join(directory, place.state["relative_path"]))
        archive = Archive(file, place.state["offset"], place.state["length"])
        tensor = archive.value()
        if not isinstance(tensor, TensorPlace):
            raise Damaged(f"{file} holds no tensor for {name}")
        offset = index.state.get("offset")
        corner = list(offset) if offset is not None else [0] * len(tensor.shape)
        tensors[name]["chunks"].append([corner, *described(archive, tensor, directory)])
        archive.close()
    common = Archive(os.path.join(directory, "common.pt"))
    found = {"format": "torch_dist", "tensors": tensors, **about(common)}
    common.close()
    return {**found, "state": kind_of(metadata.state["state_dict_metadata"])}


def about(archive: Archive) -> dict[str, Any]:
    """Arguments of the run, iteration, updates of its optimizer, and version."""
    values = archive.value()
    values = values if isinstance(values, dict) else {}
    args = values.get("args")
    state = args.state if isinstance(args, Inert) else args if isinstance(args, dict) else None  # type: ignore[attr-defined]
    steps = updates(archive, values.get("optimizer"))
    return {"args": plain(state), "iteration": plain(values.get("iteration")), "updates": steps,
            "version": plain(values.get("checkpoint_version"))}  # fmt: skip


def updates(archive: Archive, optimizer: Any) -> int | None:
    """How often the optimizer has stepped, wherever it says so; None where it does not."""
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
    groups = inner.get("param_groups") or [{}]
    for said in (inner.get("state", {}).get("common_step"), groups[0].get("step")):
        if isinstance(said, TensorPlace) and said.dtype == "float32":
            archive.file.seek(archive.place(said))
            return int(struct.unpack("<f", archive.file.read(4))[0])
        if isinstance(said, (int, float)):
            return int(said)
    return None


def scan_ranks(directory: str) -> dict[str, Any]:
    """Legacy `torch` files: the tensors of each rank."""
    ranks: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for rank in sorted(d for d in os.listdir(directory) if d.startswith("mp_rank_")):
        archive = Archive(os.path.join(directory, rank, "model_optim_rng.pt"))
        values = archive.value()
        found = found or {**about(archive), "state": "ranks" if "optimizer" in values else ""}
        models = []
        for key in ("model", *(f"model{i}" for i in range(1024))):
            if isinstance(values.get(key), dict):
                flat: dict[str, TensorPlace] = {}
                flatten(values[key], "", flat)
                models.append({n: described(archive, t, directory) for n, t in flat.items()})
        archive.close()
        ranks.append({"rank": rank, "models": models})
    return {"format": "torch", "ranks": ranks, **found}


def flatten(tree: Any, prefix: str, found: dict[str, TensorPlace]) -> None:
    """Tensors of nested dicts by dotted names."""
    for key, value in tree.items():
        if isinstance(value, dict):
            flatten(value, f"{prefix}{key}.", found)
        elif isinstance(value, TensorPlace) and not str(key).endswith("_extra_state"):
            found[f"{prefix}{key}"] = value


def main() -> int:
    """Confine the process, then read; the answer is JSON, also when something is wrong."""
    directory = sys.argv[1]
    guards = confine()
    try:
        state = "state" in sys.argv[2:]
        dist = os.path.exists(os.path.join(directory, ".metadata"))
        answer = {"guards": guards, **(scan_dist(directory, state) if dist else scan_ranks(directory))}
    except UnsafeName as error:
        answer = {"unsafe": str(error)}
    except Exception as error:  # whatever a broken or hostile file leads to is an answer, too
        answer = {"damaged": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer))
    return 0
