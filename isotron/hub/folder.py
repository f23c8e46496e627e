"""A Hugging Face directory, looked at without reading a weight: its config and where each tensor lies. PURE.

Headers of safetensors files are plain JSON and are read as such; nothing is unpickled, nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from isotron.core.errors import Problem, Refused, listed, refuse, shortened
from isotron.core.layout import Ints
from isotron.hub.families import Spelling, spelling_of_type

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 2**28
DTYPES = {  # code in safetensors headers -> torch's name, bytes per element
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
}
PICKLED = ("pytorch_model*.bin", "*.pth", "*.pt", "consolidated*.pth")
# what makes a directory complete beside weights and config; no code is copied
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "chat_template*", "LICENSE*", "NOTICE*",
    "USE_POLICY*",
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """One tensor of theirs: file, dtype code, shape, and its bytes [start, stop) in the file."""

    file: Path
    dtype: str
    shape: Ints
    start: int
    stop: int


@dataclass(frozen=True)
class Folder:
    """A directory's config.json as it stands, the model that it describes, the dtype it names, and its spelling."""

    path: Path
    values: Mapping[str, Any]
    model: Any
    dtype: str
    spelling: Spelling


def is_folder(path: str | Path) -> bool:
    """Whether a directory is Hugging Face's: a config.json that names a model type."""
    file = Path(path).expanduser() / CONFIG
    return file.is_file() and isinstance(_json(file, f"the directory {path}").get("model_type"), str)


def open_folder(path: str | Path) -> Folder:
    """Read and understand config.json; every field that is not understood is refused, all of them at once."""
    path = Path(path).expanduser()
    where = f"the model in {path}"
    values = _json(path / CONFIG, where)
    spelling = spelling_of_type(str(values.get("model_type")), where)
    fix = "a config.json as transformers writes it, with numbers where it has numbers"
    try:
        model = spelling.read_config(values, where)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise refuse(where, f"{CONFIG} has a value of the wrong kind: {error}", fix) from error
    wrong = [f"{f.name} = {getattr(model, f.name)!r}" for f in fields(model) if not _is_kind(model, f.name, f.type)]
    if wrong:
        raise refuse(where, f"{CONFIG} has values of the wrong kind: {', '.join(wrong)}", fix)
    unfit = list(_unfit(model))
    if unfit:
        raise refuse(where, f"in its {CONFIG} {'; '.join(unfit)}", "the model's own config.json, as it was published")
    return Folder(path, values, model, str(values.get("dtype") or values.get("torch_dtype") or "float32"), spelling)


def _unfit(model: Any) -> Iterator[str]:
    """Sizes that no model can have together."""
    width, heads, groups = model.hidden_size, model.num_attention_heads, getattr(model, "kv_heads", 1)
    derived = not getattr(model, "head_dim", 0) and not hasattr(model, "kv_lora_rank")
    if derived and width % heads:
        yield f"the width of {width} is no multiple of {heads} heads"
    if heads % groups:
        yield f"{heads} query heads are no multiple of {groups} key/value heads"
    experts, chosen = getattr(model, "num_experts", 0), getattr(model, "moe_router_topk", 0)
    if experts and chosen > experts:
        yield f"a token visits {chosen} of {experts} experts"


def _is_kind(model: Any, name: str, kind: Any) -> bool:
    """Whether a field that is declared as a number is one."""
    value = getattr(model, name)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return kind != "float" or (isinstance(value, int | float) and not isinstance(value, bool))


def end_tokens(path: Path) -> tuple[int, ...]:
    """Ids that end a text, by generation_config.json or else config.json; empty where neither says."""
    for name in ("generation_config.json", CONFIG):
        file = path / name
        found = _json(file, f"the model in {path}").get("eos_token_id") if file.is_file() else None
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(int(i) for i in found)
    return ()


def companions(path: Path) -> list[Path]:
    """Tokenizer, generation config and licence of a directory."""
    found = {file for pattern in COMPANIONS for file in path.glob(pattern) if file.is_file()}
    return sorted(found)


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of a directory by name; an index and its files must agree about all of them."""
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    pickled = [f.name for pattern in PICKLED for f in path.glob(pattern)]
    case = "it holds no model.safetensors and no index of several"
    if pickled:
        case += f"; {pickled[0]} is a pickle, which could run anything and is not opened"
    fix = "the same model as safetensors: transformers writes it with model.save_pretrained(DIR)"
    raise refuse(f"the weights in {path}", case, fix)


def _indexed(path: Path) -> dict[str, Stored]:
    where = f"the weights in {path}"
    places = _json(path / INDEX, where).get("weight_map")
    if not isinstance(places, Mapping):
        raise refuse(where, f"{INDEX} has no weight_map", "a complete copy of the directory")
    found: dict[str, Stored] = {}
    problems: list[Problem] = []
    fix = "a complete copy of the directory"
    for name in sorted(set(places.values())):
        file = path / name
        if Path(name).name != name or not file.is_file():
            problems.append(Problem(where, f"{INDEX} names the file {name}, which is not there", fix))
            continue
        header = read_header(file)
        expected = {key for key, where_it_is in places.items() if where_it_is == name}
        wrong = [f"{key} is in no header" for key in sorted(expected - header.keys())]
        wrong += [f"{key} is not in the index" for key in sorted(header.keys() - places.keys())]
        wrong += [f"{key} is also in {places[key]}" for key in sorted((header.keys() & places.keys()) - expected)]
        if wrong:
            problems.append(Problem(where, f"{INDEX} and {name} disagree: {listed(wrong, '; ')}", fix))
        found |= header
    if problems:
        raise Refused(shortened(problems))
    return found


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file."""
    where = f"the weights in {file}"
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise _damaged(where, f"its header would have {length} bytes")
        try:
            header = json.loads(f.read(length))
        except ValueError as error:
            raise _damaged(where, f"its header is no JSON: {error}") from error
    found, base = {}, 8 + length
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, stop = (base + int(n) for n in entry["data_offsets"])
        shape, code = tuple(entry["shape"]), str(entry["dtype"])
        elements = 1
        for n in shape:
            elements *= n
        if stop > size or start > stop or (code in DTYPES and stop - start != elements * DTYPES[code][1]):
            raise _damaged(where, f"tensor {name} of {code} {list(shape)} would lie at bytes {start}..{stop} of {size}")
        found[name] = Stored(file, code, shape, start, stop)
    return found


def _damaged(where: str, case: str) -> Refused:
    return refuse(where, f"the file is truncated or damaged: {case}", "copy it again from where it came")


def _json(file: Path, where: str) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refuse(
            where, f"{file.name} cannot be read as JSON: {error}", "a complete copy of the directory"
        ) from error
    return values if isinstance(values, dict) else {}
