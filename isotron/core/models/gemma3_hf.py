"""Gemma 3's text model in Hugging Face's spelling: config.json both ways; Gemma 2's names, gains of q and k. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotron.core.models import gemma2_hf, llama_hf, qwen3_hf
from isotron.core.models.gemma3_config import Gemma3Config
from isotron.core.models.hf_fields import Fields, agreed, written_only_if
from isotron.core.models.hf_names import Mapped

CONFIG = Gemma3Config
MODEL_TYPE = "gemma3_text"
ARCHITECTURE = "Gemma3ForCausalLM"
PREFIX, HEAD, EMBEDDING, IGNORED = llama_hf.PREFIX, llama_hf.HEAD, llama_hf.EMBEDDING, llama_hf.IGNORED


BOTH = ("full_attention", "sliding_attention")


def read_config(values: Mapping[str, Any], where: str) -> Gemma3Config:
    """The model config that a config.json describes; what is not understood is refused, all of it at once."""
    given = values.get("rope_parameters") or {}
    fields = Fields({**values, "rope_parameters": given.get(BOTH[0]) or {}}, where)
    if any(kind not in BOTH for kind in given):
        fields.cases.append(f"rope_parameters has {sorted(given)}, isotron has {' and '.join(BOTH)}")
    local = read_local(fields, given.get(BOTH[1]) or {})
    fields.need("attn_logit_softcapping")  # it stands in their config and has no effect in their model
    found = gemma2_hf.read_common(fields, 131072, 262208, pattern=6, theta=1000000.0)
    found["final_logit_softcapping"] = gemma2_hf.read_cap(fields, "final", 0.0)
    fields.finish()
    return Gemma3Config(**found, rope_local_theta=local)


def read_local(fields: Fields, given: Mapping[str, Any]) -> float:
    """The base of blocks with a window, whose frequencies have no stretch."""
    strange = {k: v for k, v in given.items() if k not in ("rope_theta", "rope_type", "type") and v is not None}
    if given.get("rope_type", "default") != "default" or strange:
        fields.cases.append(
            f"rotary positions of blocks with a window are {dict(given)!r}, isotron has no stretch there"
        )
    return float(agreed(fields, "rope_theta", given, fields.take("rope_local_base_freq", None), 10000.0))


def write_config(cfg: Gemma3Config) -> dict[str, Any]:
    """The fields of config.json that say what the weights compute."""
    written_only_if(cfg, MODEL_TYPE, attn_logit_softcapping=0.0, rope_percent=1.0)
    found = gemma2_hf.write_common(cfg)
    local = {"rope_type": "default", "rope_theta": cfg.rope_local_theta}
    pattern = {"sliding_window_pattern": cfg.window_attn_skip_freq} if cfg.window_attn_skip_freq else {}
    return {
        **found,
        **pattern,
        "attn_logit_softcapping": None,
        "rope_local_base_freq": cfg.rope_local_theta,
        "rope_parameters": {BOTH[0]: found["rope_parameters"], BOTH[1]: local},
    }


def tensors(cfg: Gemma3Config) -> list[Mapped]:
    """Every tensor of the model, ours and theirs."""
    return [*gemma2_hf.tensors(cfg), *qwen3_hf.gains(cfg)]
