"""The commonly used part of DeepSpeed's JSON, read into one typed config; everything else is refused by name. PURE.

Values "auto" follow from the rest. Keys that only tune how DeepSpeed works, and change neither numbers nor memory
here, are accepted; a key that would change either and has no counterpart is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isotron.core.errors import Problem, Refused, refuse
from isotron.core.optim.config import OptimConfig
from isotron.core.parallel.offload import Offload

AUTO = "auto"
# what may stand in the file, by table; a table's own keys under its name
KEYS: dict[str, tuple[str, ...]] = {
    "": (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "steps_per_print", "seed",
        "communication_data_type", "data_types",
    ),
    "data_types": ("grad_accum_dtype",),
    "fp16": ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
             "auto_cast", "consecutive_hysteresis"),
    "bf16": ("enabled",),
    "optimizer": ("type", "params"),
    "scheduler": ("type", "params"),
    "zero_optimization": ("stage", "reduce_bucket_size", "offload_optimizer", "offload_param"),
    "offload_optimizer": ("device", "ratio", "nvme_path"),
    "offload_param": ("device", "nvme_path"),
}  # fmt: skip
# accepted without effect: how DeepSpeed works, not what comes out
TUNING: dict[str, tuple[str, ...]] = {
    "": ("wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
         "prescale_gradients", "memory_breakdown"),
    "zero_optimization": (
        "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "allgather_bucket_size",
        "round_robin_gradients", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_param_persistence_threshold",
        "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters",
    ),
    "offload_optimizer": ("pin_memory", "buffer_count", "fast_init"),
    "offload_param": ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu"),
    "bf16": (), "fp16": (), "optimizer": (), "scheduler": (), "data_types": (),
}  # fmt: skip
# where each table stands
PLACES = {
    "": "", "data_types": "data_types", "fp16": "fp16", "bf16": "bf16", "optimizer": "optimizer",
    "params": "optimizer.params", "scheduler": "scheduler", "zero_optimization": "zero_optimization",
    "offload_optimizer": "zero_optimization.offload_optimizer", "offload_param": "zero_optimization.offload_param",
}  # fmt: skip
METHODS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lion": "lion", "fusedadam": "adamw", "muon": "muon"}
PARAMS = {
    "adamw": ("lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam", "bias_correction"),
    "sgd": ("lr", "momentum", "weight_decay"),
    "lion": ("lr", "betas", "weight_decay"),
    "muon": ("lr", "momentum", "weight_decay", "betas", "eps"),
}


@dataclass(frozen=True)
class EngineConfig:
    """What an engine needs to know. Batch sizes in samples; `optimizer` is None where the caller brings one; `dtype` is
    empty where the module keeps its own, `reduce_dtype` where gradients travel in the type of their sums, `sum_dtype`
    where these are float32.
    """

    micro_batch: int = 1
    accumulation: int = 1
    global_batch: int = 1
    dtype: str = ""
    zero: int = 0
    bucket_size: int = 40_000_000
    offload: Offload = Offload()
    reduce_dtype: str = ""
    sum_dtype: str = ""
    optim: OptimConfig = OptimConfig(clip_grad=0.0)
    optimizer: str | None = None
    lr: float = 1e-3
    weight_decay: float = 0.0
    scheduler: str | None = None
    scheduler_params: Mapping[str, Any] = field(default_factory=dict)
    steps_per_print: int = 0


def read(source: Mapping[str, Any] | str | Path, ways: int) -> EngineConfig:
    """The config of a dict, a JSON text's path, for `ways` data-parallel ranks; every problem at once."""
    tree = source if isinstance(source, Mapping) else _file(Path(source))
    problems = list(_unknown(tree))
    for name in ("fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "data_types"):
        if not isinstance(tree.get(name, {}), Mapping):
            problems.append(Problem(f'"{name}": {tree[name]!r}', "it is a table of its own", f'"{name}": {{...}}'))
    if problems:
        raise Refused(problems)
    micro, steps, whole = batch_sizes(tree, ways)
    zero = tree.get("zero_optimization", {})
    method, lr, decay, optim = _optimizer(tree)
    return EngineConfig(
        micro_batch=micro,
        accumulation=steps,
        global_batch=whole,
        dtype=_dtype(tree),
        zero=_number(zero, "stage", 0, "zero_optimization.", (0, 1, 2, 3)),
        bucket_size=_number(zero, "reduce_bucket_size", 40_000_000, "zero_optimization."),
        offload=_offload(zero),
        reduce_dtype=_type(tree, "communication_data_type"),
        sum_dtype=_sums(tree),
        optim=optim,
        optimizer=method,
        lr=lr,
        weight_decay=decay,
        scheduler=tree.get("scheduler", {}).get("type"),
        scheduler_params=_without_auto(tree.get("scheduler", {}).get("params", {})),
        steps_per_print=_number(tree, "steps_per_print", 0),
    )


def _file(path: Path) -> Mapping[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refuse(
            f"config {path}", f"it cannot be read as JSON: {error}", "a dict, or the path of a file"
        ) from error
    if not isinstance(tree, Mapping):
        raise refuse(f"config {path}", "it is no table", '{"train_batch_size": 32}')
    return tree


def _unknown(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that are in no list, with the path at which they stand."""

    def walk(table: Mapping[str, Any], name: str, path: str) -> Iterator[Problem]:
        for key, value in table.items():
            known = key in KEYS[name] or key in TUNING[name]
            if not known:
                homes = [_at(table, key) for table in PLACES if table != name and _belongs(table, key)]
                why = f"it belongs into {' or '.join(PLACES[t] or 'the top level' for t in PLACES if _belongs(t, key))}"
                fix = f"leave it out; known are {', '.join(KEYS[name])}"
                yield Problem(f'"{path}{key}"', why if homes else _why(name), " or ".join(homes) or fix)
            elif key in KEYS and isinstance(value, Mapping):
                yield from walk(value, key, f"{path}{key}.")

    return walk(tree, "", "")


def _belongs(table: str, key: str) -> bool:
    """Whether a key is known in a table."""
    rules = {name for names in PARAMS.values() for name in names} if table == "params" else ()
    return key in KEYS.get(table, ()) or key in TUNING.get(table, ()) or key in rules


def _at(table: str, key: str) -> str:
    """A key in its table, as it would be written."""
    text = f'"{key}": {"{...}" if key in PLACES else "..."}'
    for name in reversed(PLACES[table].split(".") if PLACES[table] else ()):
        text = f'"{name}": {{{text}}}'
    return text


def _why(table: str) -> str:
    where = f"in {table} " if table else ""
    return f"isotron has no such key {where}and ignores none that could change numbers or memory"


def batch_sizes(tree: Mapping[str, Any], ways: int) -> tuple[int, int, int]:
    """(per rank and forward, forwards per step, per step): any two give the third, one gives the rest."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, whole = (_given(tree, name) for name in names)
    if micro is None and steps is None and whole is None:
        case = "a step needs a size, and none of the three is a number"
        raise refuse(", ".join(f'"{n}"' for n in names), case, '"train_micro_batch_size_per_gpu": 1')
    if whole is None:
        micro, steps = micro or 1, steps or 1
        whole = micro * steps * ways
    elif micro is None:
        steps = steps or 1
        micro = whole // (steps * ways)
    elif steps is None:
        steps = whole // (micro * ways)
    if micro * (steps or 0) * ways != whole or not whole:
        asked = " ".join(f'"{n}": {v}' for n, v in zip(names, (micro, steps, whole), strict=True) if v)
        case = f"a step is micro batch x accumulation x {ways} data-parallel rank(s), in whole numbers"
        raise refuse(asked, case, f'"train_batch_size": {max(micro, 1) * max(steps or 1, 1) * ways}')
    return micro, steps or 1, whole


def _given(tree: Mapping[str, Any], name: str) -> int | None:
    return None if tree.get(name, AUTO) in (AUTO, None) else _number(tree, name, 0)


def _number(table: Mapping[str, Any], key: str, default: int, path: str = "", legal: tuple[int, ...] = ()) -> int:
    value = table.get(key, default)
    if value == AUTO:
        return default
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value) and value >= 0
    if not whole or (legal and value not in legal):
        case = f"it is one of {', '.join(map(str, legal))}" if legal else "it is a whole number of 0 or more"
        raise refuse(f'"{path}{key}": {value!r}', case, f'"{key}": {default}')
    return int(value)


def _dtype(tree: Mapping[str, Any]) -> str:
    half, brain = (tree.get(name, {}).get("enabled", False) for name in ("fp16", "bf16"))
    if half is True and brain is True:
        raise refuse('"fp16" and "bf16" enabled', "weights have one type", '"fp16": {"enabled": false}')
    return "float16" if half is True else "bfloat16" if brain is True else ""


def _type(table: Mapping[str, Any], key: str, path: str = "") -> str:
    """A type by its short name; empty for float32 and where none is given."""
    names = {None: "", "fp32": "", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}
    given = table.get(key)
    if given not in names:
        case = f"the types are {', '.join(str(n) for n in names if n)}"
        raise refuse(f'"{path}{key}": {given!r}', case, f'"{key}": "bf16"')
    return names[given]


def _sums(tree: Mapping[str, Any]) -> str:
    """The type in which gradients add up over micro batches: float32, or that of 16-bit weights."""
    found = _type(tree.get("data_types", {}), "grad_accum_dtype", "data_types.")
    if found and found != _dtype(tree):
        case = "gradients add up in float32 or in the type of 16-bit weights"
        raise refuse(f'"data_types.grad_accum_dtype": {found!r}', case, '"grad_accum_dtype": "fp32"')
    return found


def _offload(zero: Mapping[str, Any]) -> Offload:
    """What lives on the host, or in files of `nvme_path`; weights do so under stage 3."""
    state, weights = (_table(zero, key) for key in ("offload_optimizer", "offload_param"))
    device, other = state.get("device", "none"), weights.get("device", "none")
    if device not in ("none", "cpu", "nvme"):
        fix = '"offload_optimizer": {"device": "cpu"}'
        raise refuse(f'"offload_optimizer.device": {device!r}', "the devices are none, cpu and nvme", fix)
    if other not in ("none", "cpu", "nvme"):
        case = "weights live on the device, in host memory or in files"
        raise refuse(f'"offload_param.device": {other!r}', case, '"offload_param": {"device": "cpu"}')
    if other != "none" and zero.get("stage", 0) != 3:
        case = "below stage 3 every rank works with whole weights, on its device"
        raise refuse(f'"offload_param.device": "{other}"', case, '"stage": 3')
    ratio = state.get("ratio", 1.0)
    if not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise refuse(f'"offload_optimizer.ratio": {ratio!r}', "it is a share from 0 to 1", '"ratio": 1.0')
    places = _files("offload_optimizer", device, state), _files("offload_param", other, weights)
    return Offload(0.0 if device == "none" else float(ratio), places[0], other != "none", places[1])


def _files(key: str, device: Any, table: Mapping[str, Any]) -> str:
    """The directory that nvme means."""
    path = str(table.get("nvme_path", "")) if device == "nvme" else ""
    if device == "nvme" and not path:
        case, fix = "files need a directory, and nvme_path names none", '"nvme_path": "/local/disk"'
        raise refuse(f'"{key}.device": "nvme"', case, fix)
    return path


def _table(zero: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = zero.get(key) or {}
    if not isinstance(found, Mapping):
        raise refuse(f'"{key}": {found!r}', "it is a table of its own", f'"{key}": {{"device": "cpu"}}')
    return found


def _without_auto(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if value != AUTO}


def _optimizer(tree: Mapping[str, Any]) -> tuple[str | None, float, float, OptimConfig]:
    """(rule, learning rate, weight decay, config)."""
    given, half = tree.get("optimizer", {}), tree.get("fp16", {})
    params = _without_auto(given.get("params", {}))
    method = _method(given, params) if given else None
    known = PARAMS.get("adamw" if method == "adam_l2" else method or "", ())
    odd = [key for key in params if key not in known]
    if odd:
        fix = f"leave it out; known are {', '.join(known)}"
        raise Refused([Problem(f'"optimizer.params.{key}"', f"{given['type']} has no such value", fix) for key in odd])
    beta1, beta2 = params.get("betas", (0.95, 0.98) if method == "lion" else (0.9, 0.999))
    scale = half.get("loss_scale", 0)
    clip = tree.get("gradient_clipping", 0.0)
    optim = OptimConfig(
        optimizer=method or "adamw",
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=params.get("eps", 1e-8),
        lion_beta1=beta1,
        lion_beta2=beta2,
        sgd_momentum=params.get("momentum", 0.0),
        muon_momentum=params.get("momentum", 0.95),
        clip_grad=0.0 if clip == AUTO else float(clip),
        loss_scale=0.0 if scale == AUTO else float(scale),
        initial_loss_scale=2.0 ** _number(half, "initial_scale_power", 16, "fp16."),
        min_loss_scale=float(half.get("min_loss_scale", 1)),
        loss_scale_window=_number(half, "loss_scale_window", 1000, "fp16."),
        hysteresis=_number(half, "hysteresis", 2, "fp16."),
    )
    return method, float(params.get("lr", 1e-3)), float(params.get("weight_decay", 0.0)), optim


def _method(given: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    name = str(given.get("type", "")).lower()
    if name not in METHODS:
        fix = '"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}'
        raise refuse(f'"optimizer.type": {given.get("type")!r}', "the types are Adam, AdamW, SGD, Lion and Muon", fix)
    if params.get("bias_correction", True) is not True:
        raise refuse('"bias_correction": false', "moments are always corrected for their start", "leave it out")
    # DeepSpeed's Adam has decoupled weight decay unless told otherwise
    return "adam_l2" if name == "adam" and params.get("adam_w_mode", True) is False else METHODS[name]
