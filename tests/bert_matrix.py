"""The float64 matrix of encoders: layouts, also of context parallelism, x ZeRO x recompute x both places of norms."""

from __future__ import annotations

from typing import Any

from isotron.core.models.bert_config import BertConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.covering import OF_A_STEP
from tests.covering import Case as Choice

SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 8, "ffn_hidden_size": 48, "vocab_size": 131,
                         "max_position_embeddings": 16, "norm_epsilon": 1e-5}  # fmt: skip
# 5 blocks do not divide by 2 or 4 stages; an odd vocabulary, whose bias is padded with it
MODELS = {
    "post": BertConfig(5, **SIZES),
    "pre": BertConfig(5, **SIZES, norm_placement="pre", tie_embeddings=False, hidden_dropout=0.0, attention_dropout=0.0,
                      type_vocab_size=3, activation="gelu_tanh"),
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp": 2},
    "TP4+SP": {"tp": 4, "sequence_parallel": True},
    "PP4": {"pp": 4},
    "TP2+SPxPP2-uneven": {"tp": 2, "pp": 2, "sequence_parallel": True, "layers_per_stage": (4, 1)},
    "PP2x2chunks-halves": {"pp": 2, "vpp": 2, "layers_per_stage": (0.5, 1.5, 2, 1)},
    "TP2-zb-h1": {"tp": 2, "pp": 2, "schedule": "zb-h1", "deferred_logits": 0},
    "PP2xDP2-zbv": {"pp": 2, "dp": 2, "schedule": "zbv"},
    "CP2": {"cp": 2, "cp_comm_type": ("p2p", "allgather", "a2a")},
    "CP4": {"cp": 4, "cp_comm_type": ("a2a+p2p", "p2p"), "hierarchical_cp_sizes": (2, 2)},
    "CP2xTP2+SP": {"cp": 2, "tp": 2, "sequence_parallel": True, "cp_comm_type": ("a2a", "p2p", "allgather")},
    "CP2xPP2": {"cp": 2, "pp": 2, "cp_comm_type": ("allgather", "a2a", "p2p")},
}
AXES = {"layout": tuple(LAYOUTS), "model": tuple(MODELS), "rows": ("whole", "documents"), **OF_A_STEP}


def case_of(choice: Choice) -> Case:
    """Two steps of four rows of 16 slots; documents have odd lengths."""
    sizes = LAYOUTS[choice["layout"]]
    layout = Layout(
        **{"dp": 1, **sizes},
        zero=choice["zero"],
        recompute=choice["recompute"],
        recompute_modules=("core_attn", "layernorm", "moe_act", "mlp") if choice["rows"] == "whole" else ("mlp",),
        recompute_num_layers=2 if choice["recompute"] == "full" else 1,
        make_vocab_size_divisible_by=8,
        ddp_bucket_size=3000,
    )
    model = MODELS[choice["model"]]
    isolate = choice["rows"] == "documents"
    return Case(model, layout, 16, choice["microbatch"], 4, steps=2, isolate=isolate, types=model.type_vocab_size)


def legal(choice: Choice) -> bool:
    """One data-parallel rank has nothing to shard."""
    sizes = LAYOUTS[choice["layout"]]
    return choice["zero"] == 1 or sizes.get("dp", 1) * sizes.get("cp", 1) > 1
