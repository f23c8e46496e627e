"""Megatron's names of tensors, for every family here whose blocks Megatron's GPT model has. PURE.

One spelling: that of `torch_dist` checkpoints, with the number of the layer in the name. Queries, keys and values lie
group by group there (the queries of a group, its key, its value); gate and up one below the other, as here.
"""

from __future__ import annotations

import re
from typing import Any

from isotron.core.errors import listed, refuse
from isotron.core.models.hf_names import Mapped, Run, interleaved, same
from isotron.hub.families import spelling_of

# our name inside a layer -> theirs
BLOCK = {
    "attention.qkv": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "mlp.up": "mlp.linear_fc1",
    "mlp.gate_up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
}
NORMS = {"attention_norm": "self_attention.linear_qkv.layer_norm", "mlp_norm": "mlp.linear_fc1.layer_norm"}
ENDS = {
    "embed.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
    "head.weight": "output_layer.weight",
}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_OURS = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)", re.ASCII)


def theirs(ours: str) -> str | None:
    """Their name of a tensor of ours; None where they have none."""
    if ours in ENDS:
        return ENDS[ours]
    match = _OURS.fullmatch(ours)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if part in NORMS:
        return f"decoder.layers.{layer}.{NORMS[part]}_{kind}"
    return f"decoder.layers.{layer}.{BLOCK[part]}.{kind}" if part in BLOCK else None


def tensors(cfg: Any) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    table, found, unknown = cfg.layout(cfg.vocab_size), [], []
    for mapped in spelling_of(cfg.family).tensors(cfg):
        name = theirs(mapped.ours)
        if name is None:
            unknown.append(mapped.ours)
            continue
        rows = table.rule(mapped.ours).shape[0]
        if ".attention.qkv." in mapped.ours:
            each = cfg.num_attention_heads // cfg.kv_heads
            sections = (each * cfg.head_size, cfg.head_size, cfg.head_size)
            found.append(_joined(interleaved(mapped.ours, name, cfg.kv_heads, sections)))
        else:
            found.append(same(mapped.ours, name, rows))
    if unknown:
        case = f"Megatron's format has no place here for {len(unknown)} tensors: {listed(unknown)}"
        raise refuse(f"a model of the family {cfg.family} as Megatron's", case, "--to hf or --to isotron")
    return found


def _joined(mapped: Mapped) -> Mapped:
    """Runs that continue each other, as one."""
    runs: list[Run] = []
    for run in mapped.runs:
        if runs and runs[-1].first + runs[-1].count == run.first:
            runs[-1] = Run(run.theirs, runs[-1].first, runs[-1].count + run.count)
        else:
            runs.append(run)
    return Mapped(mapped.ours, tuple(runs), mapped.transposed)


# ---- other spellings of the same tensors ---------------------------------------------------------------------------

_ALIASES = (
    (r"^module\.", ""),
    (r"^model\.", ""),
    (r"^language_model\.", ""),
    (r"^encoder\.", "decoder."),
    (r"^transformer\.", "decoder."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"^word_embeddings\.", "embedding.word_embeddings."),
    (r"\.(input_layernorm|input_norm)\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\2"),
    (r"\.(pre_mlp_layernorm|post_attention_layernorm|post_attention_norm)\.(weight|bias)$",
     r".mlp.linear_fc1.layer_norm_\2"),
    (r"\.(self_attention|attention)\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(self_attention|attention)\.dense\.", ".self_attention.linear_proj."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
)  # fmt: skip


def canonical(name: str) -> str:
    """The one spelling of a name that older or other versions spell differently."""
    for pattern, replacement in _ALIASES:
        name = re.sub(pattern, replacement, name)
    return name
