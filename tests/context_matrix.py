"""The axes of the float64 matrix of long sequences: context parallelism against one process."""

from __future__ import annotations

from isotron.core.models.deepseek_v3_config import DeepseekV3Config
from isotron.core.models.gpt_oss_config import GptOssConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.covering import Case as Choice

BESIDE: dict[str, dict[str, int | bool]] = {
    "alone": {},
    "TP2": {"tp": 2},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "DP2": {"dp": 2},
}

# window: 5 of 16 slots, which end inside and between the chunks of 2 and 4 ranks; sinks; heads that 4 ranks share
MODELS = {
    "gqa": LlamaConfig(2, 32, 8, 2, 0, 48, 131, 16),
    "window": GptOssConfig(2, 32, 8, 4, 0, 48, 131, 16, num_experts=4, sliding_window=5, window_attn_skip_freq=0,
                           softmax_type="learnable", swiglu_limit=0.5),
    "dropout": LlamaConfig(2, 32, 8, 2, 0, 48, 131, 12, rope_scaling="dynamic", rope_factor=2.0, attention_dropout=0.2,
                           hidden_dropout=0.1),
    "latent": DeepseekV3Config(2, 32, 8, 8, 0, 48, 131, 16, q_lora_rank=12, kv_lora_rank=10, qk_head_dim=6,
                               qk_pos_emb_head_dim=4, v_head_dim=5, num_experts=4, moe_router_topk=2,
                               moe_ffn_hidden_size=16, moe_layer_freq="[0,1]", mtp_num_layers=2),
}  # fmt: skip

CONCERNS = {
    "gqa": ("alone", "TP2+SP", "PP2", "DP2"),
    "window": ("alone", "PP2"),
    "dropout": ("alone", "TP2+SP", "DP2"),
    "latent": ("alone", "TP2+SP"),
}
SHARDED = {"alone": (0, 1, 2, 3), "TP2+SP": (1,), "PP2": (1,), "DP2": (2, 3)}
AXES = {
    "cp": (2, 4),
    "comm": ("p2p/a2a", "allgather/p2p", "a2a+p2p/allgather"),  # of the first and of the second block
    "model": tuple(MODELS),
    "rows": ("whole", "documents"),
    "beside": ("alone", "TP2+SP", "PP2", "DP2"),
    "zero": (1, 3),
    "recompute": ("none", "full"),
}
EVERY = {**AXES, "zero": (0, 1, 2, 3)}  # with --slow


def legal(choice: Choice) -> bool:
    """At most 4 processes, and each kind of attention beside what concerns it: a minute of tests is for `--slow`."""
    beside, stages = choice["beside"], SHARDED[choice["beside"]]
    return (choice["cp"] == 2 or beside == "alone") and beside in CONCERNS[choice["model"]] and choice["zero"] in stages


def case_of(choice: Choice) -> Case:
    """Two steps of four rows of 16 slots; documents have odd lengths."""
    cp, comm = choice["cp"], choice["comm"]
    types = tuple(comm.split("/"))
    layout = Layout(
        **{"dp": 1, **BESIDE[choice["beside"]]},  # type: ignore[arg-type]
        cp=cp,
        cp_comm_type=types,
        hierarchical_cp_sizes=(2, cp // 2) if "a2a+p2p" in types else (),
        zero=choice["zero"],
        recompute=choice["recompute"],
        make_vocab_size_divisible_by=8,
        ddp_bucket_size=3000,
    )
    model = MODELS[choice["model"]]
    return Case(model, layout, 16, 2, 4, steps=2, isolate=choice["rows"] == "documents")
