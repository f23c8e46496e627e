"""Published, measured training runs as jobs: what the planner is calibrated and checked on. PURE.

`data/measured.csv` names the source of every row in `address`; its definitions differ from row to row. What can be
compared everywhere is the time of a step: given, or tokens per second, or FLOP/s under the row's own definition.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from isotron.core.models.deepseek_v3_config import PRESETS
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.plan import Layout
from isotron.planner import definitions, hardware
from isotron.planner.block_time import Place
from isotron.planner.efficiency import STACKS, Stack, fitted
from isotron.planner.job import Job
from isotron.planner.shapes import MoEConfig, UngatedConfig

Row = dict[str, str]
STACK_OF = {
    "korth22": "megatron-2021", "sc21t1": "megatron-2021", "sc21t2": "megatron-2021", "bloom": "bigscience-2022",
    "mpt": "fsdp-2023", "dgxc": "nemo-2025", "nemo2407": "nemo-2024", "nemolaunch": "nemo-2024",
    "mcoreh100": "nemo-2025", "bridge": "bridge-2026", "bridgeskill": "bridge-2026", "titan": "titan-2025",
}  # fmt: skip
SCORED = ("korth22", "sc21t1", "bloom", "dgxc", "bridge", "titan", "mpt")
_GPUS = {
    "A100-80GB": "a100-80", "A100-40GB": "a100-40", "A100": "a100-80", "H100": "h100", "H200": "h200", "B200": "b200",
    "B300": "b300", "GB200": "gb200", "GB300": "gb300", "H100-96GB(HBM2e 2.4TB/s, 500W)": "h100-96", "H800": "h800",
}  # fmt: skip
# four Omni-Path links of 100 Gb/s for eight devices
_NETWORK = {"bloom": 6.25e9}


@dataclass(frozen=True)
class Case:
    """One published run: what it did, where, and how long a step took (seconds)."""

    id: str
    source: str
    group: str
    job: Job
    device: hardware.Hardware
    stack: str
    form: str
    seconds: float
    memory: float  # GB that were measured, 0 where none
    row: Row

    def place(self, stacks: dict[str, Stack] | None = None) -> Place:
        """Where it ran, with fitted numbers."""
        return Place(self.device, (stacks or fitted())[self.stack], self.form)


@cache
def rows() -> tuple[Row, ...]:
    """Every row of the file."""
    text = files("isotron.planner").joinpath("data/measured.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def cases() -> list[Case]:
    """Every row that names a model, a layout and a time, and was read in its source (not recalled)."""
    return [c for c in map(_case, rows()) if c is not None]


def _case(row: Row) -> Case | None:
    source = row["id"].split("-")[0]
    gpu = _GPUS.get(row["gpu"])
    if source not in STACK_OF or gpu is None or row["provenance"] != "seen" or not row["tp"] or not row["hidden"]:
        return None
    if "LoRA" in row["notes"]:  # most weights have no gradient
        return None
    job = _job(row)
    form = number_format(row["precision"])
    if job is None or form is None or job.world != int(row["n_gpus"]):
        return None
    seconds = definitions.seconds(row, job)
    if not seconds:
        return None
    device = hardware.known()[gpu]
    device = replace(device, outer=_NETWORK.get(source, device.outer))
    memory = float(row["mem_gb"]) if row["mem_gb"] else 0.0
    where = f"{row['tp']}x{row['pp']}" if source == "bloom" else row["n_gpus"]
    group = "/".join((source, row["model_name"], row["gpu"], where, row["seq"]))
    return Case(row["id"], source, group, job, device, stack_of(row, source), form, seconds, memory, row)


def stack_of(row: Row, source: str) -> str:
    """The framework at its time: releases of Megatron-Bridge differ by half within a year."""
    return "bridge-2025" if source == "bridge" and " 25." in row["source"] else STACK_OF[source]


def number_format(precision: str) -> str | None:
    """The format of the matrix products; None for formats that are not modelled."""
    p = precision.upper()
    if p.startswith("NVFP4"):
        return "fp4"
    if "MX" in p or "SUB-CHANNEL" in p or "ROWWISE" in p:
        return "fp8-block"
    if p.startswith("FP8"):
        return "fp8"
    return "16bit" if p in ("BF16", "FP16", "") else None


def _int(row: Row, name: str, default: int = 0) -> int:
    return int(float(row[name])) if row[name] else default


def _job(row: Row) -> Job | None:
    config = _config(row)
    gbs, mbs = _int(row, "gbs"), _int(row, "mbs", 1)
    if config is None or not gbs:
        return None
    tp, pp, cp, vpp = (_int(row, x, 1) for x in ("tp", "pp", "cp", "vpp"))
    dp = _int(row, "dp") or _int(row, "n_gpus") // (tp * pp * cp)
    if gbs % (mbs * dp) or config.num_layers < pp * vpp or not dp:
        return None
    zero = {"0": 0, "2": 3, "3": 3, "FSDP2(3)": 3, "FSDP(3)": 3}.get(row["zero_stage"], 1)
    recompute = "full" if row["recompute"] == "full" else "selective" if "selective" in row["recompute"] else "none"
    if row["id"].startswith("titan") and not row["recompute"]:
        recompute = "selective"  # the default of its configs
    sp = row["sequence_parallel"] == "yes" or (not row["sequence_parallel"] and tp > 1 and int(row["year"]) >= 2023)
    schedule = "interleaved" if vpp > 1 and pp > 1 else "1f1b"
    layout = Layout(tp, pp, dp, vpp if pp > 1 else 1, sp, -1, schedule, recompute=recompute)
    layout = replace(layout, zero=zero, cp=cp, etp=1 if row["moe_experts"] else 0)
    return Job(config, layout, _int(row, "seq"), mbs, gbs, "bfloat16", _int(row, "ep", 1), whole_recompute=True)


def _config(row: Row) -> Any:
    """The model's shape; where the number of layers is missing it follows from the number of parameters."""
    h, heads, vocab, seq = _int(row, "hidden"), _int(row, "heads"), _int(row, "vocab") or 32000, _int(row, "seq")
    ffn, kv = _int(row, "ffn") or 4 * h, _int(row, "kv_heads") or heads
    layers = _int(row, "layers")
    if not layers and row["params_b"]:
        layers = round((float(row["params_b"]) * 1e9 - vocab * h) / (12 * h * h))
    if not layers or not heads or h % heads and not row["moe_experts"]:
        return None
    name = row["model_name"].lower()
    llama = (layers, h, heads, kv, 0, ffn, vocab, seq)
    if row["moe_experts"]:
        return _experts(row, llama)
    if "llama" in name:
        return LlamaConfig(*llama)
    if "nemotron" in name:
        return UngatedConfig(*llama)
    return GPTConfig(layers, h, heads, ffn, vocab, seq)


def _experts(row: Row, llama: tuple[int, ...]) -> Any:
    """Grok and its like are told by their numbers of experts; rows that lack a number are left out. What a row does not
    say and its architecture does: the width of heads, latent attention, dense blocks, the shared expert, windows.
    """
    if not row["topk"] or not row["moe_ffn"]:
        return None
    layers, h, heads, kv, _, ffn, vocab, seq = llama
    experts, topk, width = (_int(row, name) for name in ("moe_experts", "topk", "moe_ffn"))
    name = row["model_name"].lower()
    if "deepseekv3" in name or "kimi" in name:  # DeepSeek-AI 2024, table of section 4.2; Moonshot 2025
        dense = 1 if "kimi" in name else 3
        blocks: dict[str, Any] = {
            "num_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": vocab,
        }
        moe: dict[str, Any] = {"num_experts": experts, "moe_router_topk": topk, "moe_ffn_hidden_size": width}
        pattern = f"[0]*{dense}+[1]*{layers - dense}"
        return replace(DEEPSEEK, **blocks, **moe, moe_layer_freq=pattern, moe_router_num_groups=0,
                       moe_router_group_topk=0, moe_router_group_scores=0)  # fmt: skip
    kv_channels = {"qwen3": 128, "gpt oss": 64}.get(next((k for k in ("qwen3", "gpt oss") if k in name), ""), 0)
    window = 128 if "gpt oss" in name else 0
    config = MoEConfig(layers, h, heads, kv, kv_channels, ffn, vocab, seq)
    return replace(config, experts=experts, topk=topk, moe_ffn=width, window=window)


DEEPSEEK = PRESETS["deepseek-v3"]


def by_source(found: list[Case]) -> Iterator[tuple[str, list[Case]]]:
    """Cases of each source, in the order of `STACK_OF`."""
    for source in STACK_OF:
        own = [c for c in found if c.source == source]
        if own:
            yield source, own


def stacks() -> tuple[str, ...]:
    """Names of all stacks."""
    return tuple(STACKS)
