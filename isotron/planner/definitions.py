"""FLOPs of a step as different publications define them. PURE.

Letters as there: L layers, h width, s sequence, a heads, g key/value heads, f feed-forward, V vocabulary, B sequences
per step, N parameters. All are FLOPs per step over all devices. Sources: Narayanan et al. 2021, appendix;
Korthikanti et al. 2022, appendix A; Chowdhery et al. 2022 (PaLM), appendix B; the repositories named per function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isotron.planner.job import Job
from isotron.planner.pairs import are_read
from isotron.planner.parameters import count_parameters
from isotron.planner.work import step_flops


def _letters(job: Job) -> tuple[int, int, int, int, int, int, int, int]:
    c = job.config
    return (c.num_layers, c.hidden_size, job.seq, c.num_attention_heads, c.kv_heads, c.ffn, c.vocab_size,
            job.global_batch)  # fmt: skip


def sc21(job: Job) -> float:
    """Narayanan et al. 2021, BLOOM, DeepSpeed on Azure: four passes, the recomputed one counted (HFU)."""
    layers, h, s, _, _, _, v, b = _letters(job)
    return 96.0 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))


def korthikanti(job: Job) -> float:
    """Korthikanti et al. 2022, NeMo's launcher: model FLOPs, the whole square of attention (MFU)."""
    layers, h, s, _, _, _, v, b = _letters(job)
    return 72.0 * b * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))


def korthikanti_hardware(job: Job) -> float:
    """The same with attention computed again (HFU of selective recompute)."""
    layers, h, s, _, _, _, v, b = _letters(job)
    return 72.0 * b * s * layers * h * h * (1 + s / (3 * h) + v / (12 * layers * h))


def megatron(job: Job) -> float:
    """Megatron-LM today, Megatron-Bridge, isotron: products of the mathematics, attention causal."""
    return step_flops(job).model


def dgxc_llama(job: Job) -> float:
    """DGX Cloud's Llama 3.1: the whole square of attention."""
    layers, h, s, a, g, f, v, b = _letters(job)
    return float(b * s * (12 * layers * h * h * (1 + g / a + s / h) + 18 * layers * f * h + 6 * v * h))


def dgxc_gpt(job: Job) -> float:
    """DGX Cloud's GPT-3 and Nemotron of release 25.02: every query head its own key, the whole square."""
    layers, h, s, _, _, _, v, b = _letters(job)
    return float(b * s * (24 * layers * h * h + 12 * layers * h * s + 48 * layers * h * h + 6 * v * h))


def dgxc_nemotron(job: Job) -> float:
    """DGX Cloud's Nemotron of release 25.05: as Llama without a gate."""
    layers, h, s, a, g, f, v, b = _letters(job)
    return float(b * s * (12 * layers * h * h * (1 + g / a + s / h) + 12 * layers * f * h + 6 * v * h))


def six_n(job: Job) -> float:
    """PaLM and MPT: 6 N per token and the whole square of attention."""
    c = job.config
    core = 12.0 * c.num_layers * c.num_attention_heads * c.head_size * job.seq
    return job.step_tokens * (6.0 * count_parameters(c) + core)


DEFINITIONS: Mapping[str, Callable[[Job], float]] = {
    "megatron": megatron,
    "korthikanti-mfu": korthikanti,
    "korthikanti-hfu": korthikanti_hardware,
    "sc21-hfu": sc21,
    "palm": six_n,
    "dgxc-llama": dgxc_llama,
    "dgxc-gpt": dgxc_gpt,
    "dgxc-nemotron": dgxc_nemotron,
}


def of_row(row: Mapping[str, str]) -> str:
    """The definition that a published row uses; "" where it says none that is known."""
    text, source, model = row["flops_definition"], row["id"].split("-")[0], row["model_name"].lower()
    if source in ("sc21t1", "bloom", "dsazure"):
        return "sc21-hfu"
    if source == "korth22" or "2205.05198" in text:
        return "korthikanti-mfu"
    if source == "mpt":
        return "palm"
    if source in ("bridge", "bridgeskill", "mcoreh100"):
        return "megatron"
    if source == "dgxc" and "llama" in model:
        return "dgxc-llama"
    if source == "dgxc" and "grok" not in model:
        return "dgxc-nemotron" if "25.05" in text else "dgxc-gpt"
    return ""


def seconds(row: Mapping[str, str], job: Job) -> float:
    """Seconds of a step: as published, from tokens per second, or from FLOP/s under the row's definition; 0 if none."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    devices = float(row["n_gpus"])
    if row["tokens_per_s_per_gpu"]:
        return job.step_tokens / float(row["tokens_per_s_per_gpu"]) / devices
    name = of_row(row)
    if row["tflops_per_gpu"] and name:
        return DEFINITIONS[name](job) / (float(row["tflops_per_gpu"]) * 1e12 * devices)
    return 0.0


def utilisation(job: Job, step: float, peak: float) -> dict[str, dict[str, Any]]:
    """TFLOP/s per device and share of the peak under each general definition; the formulas know of decoders alone."""
    found = {}
    for name in ("megatron",) if are_read(job) else ("megatron", "korthikanti-mfu", "sc21-hfu", "palm"):
        rate = DEFINITIONS[name](job) / step / job.world
        found[name] = {"tflops": rate / 1e12, "of_peak": rate / peak}
    return found
