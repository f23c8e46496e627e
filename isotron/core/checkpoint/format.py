"""The checkpoint format: what a step directory holds, and the manifest that describes it. PURE.

A step directory holds `manifest.json`, safetensors files with chunks of tensors, and any further files (tokenizer).
The manifest is data from outside: everything in it is checked before anybody uses it, and checking touches nothing but
the manifest. docs/checkpoints.md specifies the format for other programs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from isotron.core.checkpoint.cover import cover_error
from isotron.core.checkpoint.migrate import VERSION, migrated, seal_error, sealed
from isotron.core.errors import refuse
from isotron.core.layout import Box, Ints

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**31
MAX_DIMS = 64

# Name in the manifest (torch's) -> code in safetensors headers, bytes per element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


@dataclass(frozen=True)
class Chunk:
    """One region of a tensor: stored under `key` in safetensors file `file` with the shape of `box`."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class Entry:
    """One tensor: dtype (a name of `DTYPES`), global shape, and chunks that cover it exactly once."""

    dtype: str
    shape: Ints
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and hexadecimal SHA-256 of one file beside the manifest."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checked manifest. `meta` is the caller's: model config, tokenizer, data position, optimizer step, ..."""

    step: int
    meta: dict[str, Any]
    tensors: dict[str, Entry]
    files: dict[str, FileEntry]

    def dumps(self) -> bytes:
        """The file's content: UTF-8 JSON, one line per tensor and per file so that a reader can look at it."""
        tensors = {
            name: {
                "dtype": e.dtype,
                "shape": e.shape,
                "chunks": [
                    {"offset": c.box.offset, "shape": c.box.shape, "file": c.file, "key": c.key} for c in e.chunks
                ],
            }
            for name, e in sorted(self.tensors.items())
        }
        files = {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in sorted(self.files.items())}
        meta = json.dumps(self.meta, indent=1, allow_nan=False)
        text = f'{{"format_version": {VERSION},\n"step": {self.step},\n"meta": {meta},\n'
        return sealed(f'{text}"tensors": {_lines(tensors)},\n"files": {_lines(files)}')


def _lines(table: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table.items()) + "\n}"


class BadManifest(ValueError):
    """A manifest that breaks the format; the message names the field, its value and the rule."""


def read_manifest(path: str | Path) -> Manifest:
    """Read and check the manifest of the step directory `path`; anything wrong is refused, nothing is changed."""
    file = Path(path) / MANIFEST
    try:
        size = file.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise BadManifest(f"the file has {size} bytes; at most {MAX_MANIFEST_BYTES} are read")
        return parse_manifest(file.read_bytes())
    except RecursionError as error:
        raise _unreadable(file, "is not in this format: its JSON is nested too deeply") from error
    except FileNotFoundError as error:
        raise _unreadable(file, "is missing") from error
    except OSError as error:
        raise _unreadable(file, f"cannot be read: {error.strerror}") from error
    except BadManifest as error:
        raise _unreadable(file, f"is damaged or not in this format: {error}") from error
    except ValueError as error:
        raise _unreadable(file, f"is damaged, what it holds is no JSON: {error}") from error


def _unreadable(file: Path, why: str) -> Exception:
    step = file.parent
    others = sorted(m.parent for m in step.parent.glob(f"step_*/{MANIFEST}") if m.parent != step)
    fix = "copy it again from where this checkpoint came"
    if others and step.name.startswith("step_"):
        fix = f"{others[-1]}, another step of the same run, or {fix}"
    return refuse(f"read the checkpoint {step}", f"{file.name} {why}", fix)


def parse_manifest(data: bytes) -> Manifest:
    """Manifest from the file's bytes; raises ValueError (BadManifest with the field's name) for anything else."""
    raw = _need(json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant), dict, "the manifest")
    version = _count(raw.get("format_version"), "format_version")
    if version > VERSION:
        readable = f"this program reads versions 1 to {VERSION}; update isotron"
        raise BadManifest(f"it has format version {version}, {readable}")
    if version < 1:
        raise BadManifest(f"it has format version {version}, which never existed; the first is 1")
    damage = seal_error(data) if version >= 2 else None
    if damage:
        raise BadManifest(damage)
    raw = migrated(raw, version)
    files = _table(raw, "files", _file)
    tensors = _table(raw, "tensors", _entry)
    _check_chunks(tensors, files)
    return Manifest(_count(raw.get("step"), "step"), _need(raw.get("meta"), dict, "meta"), tensors, files)


T = TypeVar("T")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON object that refuses a repeated key: two readers could otherwise see two different checkpoints."""
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [k for k, _ in pairs]
        raise BadManifest(f"key {next(k for k in keys if keys.count(k) > 1)!r} appears twice in one object")
    return table


def _no_constant(text: str) -> Any:
    raise BadManifest(f"{text} is not JSON")


def _need(value: Any, kind: type[T], where: str) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadManifest(f"{where} is {_short(value)}; it must be a JSON {_JSON_NAMES[kind]}")
    return value


_JSON_NAMES: Mapping[type, str] = {dict: "object", list: "array", str: "string", int: "whole number"}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _count(value: Any, where: str) -> int:
    number = _need(value, int, where)
    if not 0 <= number < 2**63:
        raise BadManifest(f"{where} is {_short(number)}; it must be at least 0 and below 2**63")
    return number


def _ints(value: Any, where: str) -> Ints:
    values = _need(value, list, where)
    if len(values) > MAX_DIMS:
        raise BadManifest(f"{where} has {len(values)} entries; a tensor has at most {MAX_DIMS} dimensions")
    for i, n in enumerate(values):
        if type(n) is not int or not 0 <= n < 2**63:  # big checkpoints have millions: words only for a bad one
            _count(n, f"{where}[{i}]")
    return tuple(values)


def _table(raw: Mapping[str, Any], field: str, parse: Callable[[Any, str], T]) -> dict[str, T]:
    """The object `raw[field]`, its keys checked as names and its values parsed."""
    table = {}
    for name, value in _need(raw.get(field), dict, field).items():
        error = file_name_error(name) if field == "files" else tensor_name_error(name)
        if error:
            raise BadManifest(f"{field}: name {_short(name)} {error}")
        table[name] = parse(value, f"{field}[{_short(name)}]")
    return table


def _file(value: Any, where: str) -> FileEntry:
    value = _need(value, dict, where)
    digest = _need(value.get("sha256"), str, f"{where}.sha256")
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise BadManifest(f"{where}.sha256 is {_short(digest)}; it must be 64 lower-case hexadecimal digits")
    return FileEntry(_count(value.get("bytes"), f"{where}.bytes"), digest)


def _entry(value: Any, where: str) -> Entry:
    value = _need(value, dict, where)
    dtype = _need(value.get("dtype"), str, f"{where}.dtype")
    if dtype not in DTYPES:
        raise BadManifest(f"{where}.dtype is {_short(dtype)}; known are {', '.join(DTYPES)}")
    shape = _ints(value.get("shape"), f"{where}.shape")
    if prod(n for n in shape if n) * DTYPES[dtype][1] >= 2**63:
        raise BadManifest(f"{where}.shape is {_short(list(shape))}; that is more bytes than a file can have")
    chunks = _need(value.get("chunks"), list, f"{where}.chunks")
    return Entry(dtype, shape, tuple(_chunk(c, f"{where}.chunks[{i}]") for i, c in enumerate(chunks)))


def _chunk(value: Any, where: str) -> Chunk:
    value = _need(value, dict, where)
    box = Box(_ints(value.get("offset"), f"{where}.offset"), _ints(value.get("shape"), f"{where}.shape"))
    if len(box.offset) != len(box.shape):
        raise BadManifest(f"{where} has {len(box.offset)} offsets and {len(box.shape)} sizes")
    return Chunk(box, _need(value.get("file"), str, f"{where}.file"), _need(value.get("key"), str, f"{where}.key"))


def _check_chunks(tensors: Mapping[str, Entry], files: Mapping[str, FileEntry]) -> None:
    """Chunks lie in listed files under their own keys, fit into them, and cover each tensor exactly once."""
    seen: set[tuple[str, str]] = set()
    used = dict.fromkeys(files, 0)
    for name, entry in tensors.items():
        for chunk in entry.chunks:
            if chunk.file not in used:
                raise BadManifest(f"tensor {name!r} uses file {_short(chunk.file)}, which `files` does not list")
            if (chunk.file, chunk.key) in seen:
                raise BadManifest(f"key {_short(chunk.key)} of {chunk.file} belongs to two chunks")
            seen.add((chunk.file, chunk.key))
            used[chunk.file] += chunk.box.size * DTYPES[entry.dtype][1]
        error = cover_error(entry.shape, [(c.box, c.file) for c in entry.chunks])
        if error:
            raise BadManifest(f"tensor {name!r}: {error}")
    for file, size in used.items():
        if size > files[file].bytes:
            raise BadManifest(f"chunks in {file} need {size} bytes, the file has {files[file].bytes}")


def tensor_name_error(name: str) -> str | None:
    """Why `name` cannot be the name of a tensor, or None."""
    if not name or not name.isprintable() or len(name) > 1024:
        return "must have 1 to 1024 printable characters"
    return None


def file_name_error(name: str) -> str | None:
    """Why `name` cannot be a file of a checkpoint, or None: relative, inside the directory, and not the manifest."""
    if not name or not name.isprintable() or len(name) > 1024 or "\\" in name or ":" in name:
        return "must have 1 to 1024 printable characters, without backslash and colon"
    parts = name.split("/")
    if any(p in ("", ".", "..") or len(p.encode()) > 255 for p in parts):
        return "must be a relative path without '.', '..' and empty parts"
    return f"must not be {MANIFEST}" if parts[0] == MANIFEST else None
