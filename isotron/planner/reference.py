"""Published formulas of memory, and the memory of published runs by them. PURE.

What isotron itself keeps is counted in `activations.py`. These are the formulas of Korthikanti et al. 2022 (section 4
and table 2) and of the frameworks whose measured bytes are known; letters as there: s sequence, b microbatch, h width,
a heads, t tensor-parallel ranks, L layers, p pipeline ranks, v chunks per rank. Bytes per layer unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.planner.activations import block_bytes, stage_bytes
from isotron.planner.hardware import GIB
from isotron.planner.parameters import stage_layers
from isotron.planner.published import Case
from isotron.planner.time import held_elements
from isotron.planner.work import block_products


def layer_activations(
    s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Activations of a GPT layer in 16 bits with dropout and scores in memory."""
    sbh = s * b * h
    if recompute == "full":
        return 2 * sbh / (t if sequence_parallel else 1)
    scores = 0.0 if recompute == "selective" else 5 * a * s / h
    return sbh / t * (34 + scores) if sequence_parallel else sbh * (10 + 24 / t + scores / t)


def first_stage(per_layer: float, layers: int, p: int, v: int = 1) -> float:
    """Activations of the first pipeline rank: what all layers keep of one microbatch, more when interleaved."""
    return per_layer * layers * (1 + (p - 1) / (p * v) if v > 1 else 1)


def state_per_parameter(dtype: str, d: int) -> float:
    """Bytes per parameter with state sharded over d ranks: weights and gradients whole, the rest divided."""
    whole, divided = {"bfloat16": (6, 12), "float16": (4, 16), "float32": (8, 8)}[dtype]
    return whole + divided / d


# what an allocator of fixed segments reserves beyond what is allocated: one number, from torchtitan's runs of 2024
FRAGMENTS = 0.1


@dataclass(frozen=True)
class Measured:
    """Predicted and measured bytes of a published run, and the prediction by kind."""

    id: str
    predicted: float
    measured: float
    kinds: dict[str, float]


def published(case: Case) -> Measured | None:
    """Bytes of the fullest rank of a run whose bytes were measured, by its framework's rules; None for others."""
    if not case.memory or case.source not in ("bloom", "titan"):
        return None
    kinds = _bloom(case) if case.source == "bloom" else _titan(case)
    unit = 1e9 if case.source == "bloom" else GIB
    return Measured(case.id, sum(kinds.values()), case.memory * unit, kinds)


def _bloom(case: Case) -> dict[str, float]:
    """Megatron-DeepSpeed: ZeRO-1, fp16 or bf16 with fp32 sums, full recompute, explicit scores, logits in fp32.

    The number that was measured is that of nvidia-smi: the allocator's cache and the context of the device are in it.
    """
    job, c = case.job, case.job.config
    held, t = held_elements(job), job.layout.tp
    whole, divided = (4, 16) if case.row["precision"] == "FP16" else (6, 12)
    h, s, b = c.hidden_size, job.seq, job.micro_batch
    blocks = max(len(r) for r in stage_layers(c, job.layout))
    flight = min(job.layout.pp, job.microbatches)
    kept = layer_activations(s, b, h, c.num_attention_heads, t, recompute="full") * blocks * flight
    working = layer_activations(s, b, h, c.num_attention_heads, t)
    logits = s * b * job.layout.padded_vocab(c.vocab_size) / t * 10
    state = held * (whole + divided / job.dp)
    flat = held * 2  # gradients copied into one buffer for their reduction
    parts = {"state": state, "reduction": flat, "activations": kept, "working": working, "logits": logits}
    return {**parts, "context": case.device.context}


def _titan(case: Case) -> dict[str, float]:
    """FSDP2: fp32 weights, gradients and moments sharded over all ranks; two blocks gathered; logits in fp32.

    Selective recompute is torchtitan's: the outputs of every second product and of attention are kept. What was
    measured is what the allocator has reserved. Since 2025 its segments grow in place, and the loss is compiled:
    nothing as large as the logits is made beside them and their gradient.
    """
    recent = int(case.row["year"]) >= 2025
    job, c = case.job, case.job.config
    held, split = held_elements(job), job.layout.tp if job.layout.sequence_parallel else 1
    whole = job.tokens * c.hidden_size * job.element
    logits = job.tokens * c.vocab_size / job.layout.tp * (2 + 2 if recent else 4 + 4 + 2)
    gathered = 2 * held / c.num_layers * 4 + 2 * c.vocab_size * c.hidden_size / job.layout.tp * 2
    if job.layout.recompute == "full":
        kept = stage_bytes(job, c.num_layers, True, True)
    else:
        outputs = sum(p.outputs for p in block_products(c, job.layout.tp))
        per_token = 2 * c.hidden_size / split + outputs / 2
        kept = per_token * job.tokens * job.element * c.num_layers
    kinds = {
        "state": held * 16 / job.data_ranks,
        "gathered": gathered,
        "activations": kept,
        "working": block_bytes(job, "none") + (4 * whole if split > 1 else 0),
        "logits": logits,
    }
    return kinds if recent else {**kinds, "fragments": sum(kinds.values()) * FRAGMENTS}
