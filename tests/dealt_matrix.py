"""The axes of the float64 matrix of documents dealt anew: groups of ranks of different size against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.context_matrix import MODELS as LONG
from tests.covering import Case as Choice

BASE = Layout(
    dp=4, hybrid_context_parallel=True, hybrid_costs=(1.0, 0.01), make_vocab_size_divisible_by=8, ddp_bucket_size=3000
)
EXPERTS = MixtralConfig(4, 32, 8, 4, 0, 48, 131, 16, num_experts=4, moe_aux_loss_coeff=0.1)

MODELS: dict[str, Any] = {
    "dropout": replace(LONG["gqa"], num_layers=4, hidden_dropout=0.1, attention_dropout=0.2, softmax_type="learnable"),
    "positions": GPTConfig(4, 32, 8, vocab_size=131, max_position_embeddings=16, hidden_dropout=0.2),
    "window": replace(LONG["window"], num_layers=4),
    "balanced": replace(EXPERTS, moe_z_loss_coeff=0.01, moe_input_jitter_eps=0.1),
    "latent": replace(LONG["latent"], num_layers=4, moe_layer_freq="1", mtp_num_layers=2, moe_aux_loss_coeff=0.1,
                      moe_router_load_balancing_type="global"),
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "DP4": {},
    "CP2xDP2": {"cp": 2, "dp": 2},
    "CP3xDP2": {"cp": 3, "dp": 2},  # groups of two at most
    "TP2+SP": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2, "dp": 2},
    "PP2x2chunks": {"pp": 2, "dp": 2, "vpp": 2},
    "PP2 in a V": {"pp": 2, "dp": 2, "schedule": "zbv"},
}

# two documents per row, 5 and 11 slots: with 4 slots on a rank on 2 and 4 ranks, with 8 on 1 and 2, with 16 where the
# work is equal; empty microbatches where ranks meet in every one
AXES = {
    "model": tuple(MODELS),
    "beside": tuple(BESIDE),
    "zero": (0, 1, 2, 3),
    "slots": (4, 8, 16),
    "rows": ("documents", "whole"),
    "comm": ("p2p", "allgather", "a2a/p2p"),  # the last: of every other block
    "recompute": ("none", "selective", "full"),
    "experts": ("here", "dealt", "halves"),  # halves: dealt, and a half of the tokens sent at a time
}


def legal(choice: Choice) -> bool:
    """Rows fit the ranks, and ranks divide heads that are dealt; only experts are dealt."""
    ranks = 4 if choice["beside"] in ("DP4", "CP2xDP2") else 2
    dense = choice["model"] in ("dropout", "positions")
    heads = choice["comm"] != "a2a/p2p" or choice["beside"] != "CP3xDP2"  # 8 heads are dealt to 2 or 4 ranks
    return choice["slots"] * ranks >= 16 and heads and not (dense and choice["experts"] != "here")


def case_of(choice: Choice) -> Case:
    """Two steps of four rows of 16 slots."""
    layout = replace(
        BASE,
        **BESIDE[choice["beside"]],
        zero=choice["zero"],
        max_seqlen_per_dp_cp_rank=choice["slots"],
        cp_comm_type=("a2a", "p2p") * 2 if choice["comm"] == "a2a/p2p" else (choice["comm"],),
        recompute=choice["recompute"],
        ep=1 if choice["experts"] == "here" else 2,
        etp=0 if choice["experts"] == "here" else 1,
        overlap_moe_expert_parallel_comm=choice["experts"] == "halves",
    )
    return Case(MODELS[choice["model"]], layout, 16, 1, 4, steps=2, isolate=choice["rows"] == "documents")
