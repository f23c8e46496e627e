"""The float64 matrix of encoder-decoder models: layouts x ZeRO x recompute x schedules x the two kinds of T5."""

from __future__ import annotations

from typing import Any

from isotron.core.models.t5_config import T5Config
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.covering import OF_A_STEP
from tests.covering import Case as Choice

# 3 + 3 blocks: a stage of two holds one side, a stage of four holds blocks of both or of one
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 6, "ffn_hidden_size": 48,
                         "vocab_size": 131, "max_position_embeddings": 24, "relative_attention_num_buckets": 8,
                         "relative_attention_max_distance": 12}  # fmt: skip
MODELS = {
    "t5": T5Config(3, 3, **SIZES),
    "v1.1": T5Config(2, 3, **SIZES, feed_forward_proj="gated-gelu", tie_embeddings=False, hidden_dropout=0.0,
                     attention_dropout=0.0),
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp": 2},
    "TP4+SP": {"tp": 4, "sequence_parallel": True},
    "PP2-uneven": {"pp": 2, "uneven": True},
    "PP4": {"pp": 4},
    "PP2xDP2": {"pp": 2, "dp": 2},
    "TP2+SPxPP2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "PP2x2chunks": {"pp": 2, "vpp": 2},
    "PP2xDP2-zbv": {"pp": 2, "dp": 2, "schedule": "zbv"},
    "TP2-zb-h1": {"tp": 2, "pp": 2, "schedule": "zb-h1", "deferred_logits": 0},
}
AXES = {"layout": tuple(LAYOUTS), "model": tuple(MODELS), **OF_A_STEP}


def case_of(choice: Choice) -> Case:
    """Two steps of four pairs: 24 tokens for the encoder, 16 for the decoder."""
    sizes = dict(LAYOUTS[choice["layout"]])
    model, uneven = MODELS[choice["model"]], sizes.pop("uneven", False)
    if uneven:  # the first stage holds one block of the decoder too
        sizes["layers_per_stage"] = (model.encoder_num_layers + 1, model.decoder_layers - 1)
    layout = Layout(
        **{"dp": 1, **sizes},
        zero=choice["zero"],
        recompute=choice["recompute"],
        recompute_method="block" if uneven else "uniform",
        recompute_num_layers=2 if choice["recompute"] == "full" else 1,
        make_vocab_size_divisible_by=8,
        ddp_bucket_size=3000,
    )
    return Case(model, layout, 16, choice["microbatch"], 4, steps=2, source=24)


def legal(choice: Choice) -> bool:
    """One data-parallel rank has nothing to shard."""
    return choice["zero"] == 1 or LAYOUTS[choice["layout"]].get("dp", 1) > 1
