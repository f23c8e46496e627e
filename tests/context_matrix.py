"""The axes of the float64 matrix of long sequences: context parallelism against one process."""

from __future__ import annotations

from dataclasses import replace

from isotron.core.models.deepseek_v3_config import PRESETS
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.mistral_config import MistralConfig
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

# window: 5 of 16 slots, so that it ends inside and between the chunks of 2 and 4 ranks
MODELS = {
    "gqa": LlamaConfig(2, 32, 8, 2, 0, 48, 131, 16),
    "window": MistralConfig(2, 32, 8, 4, 0, 48, 131, 16, sliding_window=5),
    "dropout": GPTConfig(2, 32, 8, vocab_size=131, max_position_embeddings=16, attention_dropout=0.2,
                         hidden_dropout=0.1),
    "latent": replace(PRESETS["deepseek-v3-tiny"], num_layers=2, moe_layer_freq="[0,1]", vocab_size=131,
                      max_position_embeddings=16, num_attention_heads=8, num_key_value_heads=8),
    "dynamic": LlamaConfig(2, 32, 8, 2, 0, 48, 131, 12, rope_scaling="dynamic", rope_factor=2.0),
}  # fmt: skip

AXES = {
    "cp": (2, 4),
    "comm": ("p2p", "allgather", "a2a", "a2a+p2p", "mixed"),
    "model": tuple(MODELS),
    "rows": ("whole", "documents"),
    "beside": ("alone", "TP2+SP", "PP2", "DP2"),
    "zero": (0, 1),
    "recompute": ("none", "full"),
}


def legal(choice: Choice) -> bool:
    """At most 4 processes: 8 processes on 2 cores are too slow to be run always."""
    return choice["cp"] == 2 or choice["beside"] == "alone"


def case_of(choice: Choice) -> Case:
    """Two steps of four rows of 16 slots; documents have odd lengths."""
    cp, comm = choice["cp"], choice["comm"]
    types = ("a2a", "p2p") if comm == "mixed" else (comm,)
    layout = Layout(
        **{"dp": 1, **BESIDE[choice["beside"]]},  # type: ignore[arg-type]
        cp=cp,
        cp_comm_type=types,
        hierarchical_cp_sizes=(2, cp // 2) if comm == "a2a+p2p" else (),
        zero=choice["zero"],
        recompute=choice["recompute"],
        make_vocab_size_divisible_by=8,
        ddp_bucket_size=3000,
    )
    model = MODELS[choice["model"]]
    return Case(model, layout, 16, 2, 4, steps=2, isolate=choice["rows"] == "documents")
