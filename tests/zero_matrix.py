"""The axes of the float64 matrix of sharded data parallelism, and one case of it."""

from __future__ import annotations

from dataclasses import replace

from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.covering import Case as Choice
from tests.matrix import MODELS as DENSE
from tests.moe_matrix import MODELS as EXPERTS
from tests.moe_matrix import mixtral

MODELS = {
    **DENSE,
    "experts": replace(mixtral(moe_shared_expert_intermediate_size=16), num_layers=4),
    "predictions": replace(EXPERTS["mla"], num_layers=4, moe_layer_freq="[0]+[1]*3"),  # tokens further ahead
}

LAYOUTS: dict[str, dict[str, int | bool]] = {
    "DP2": {"dp": 2},
    "DP4": {"dp": 4},
    "DP4 in copies of 2": {"dp": 4, "zero_shard_size": 2},
    "TP2+SPxDP2": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "PP2xDP2": {"pp": 2, "dp": 2},
    "PP2xDP2 zb-h1": {"pp": 2, "dp": 2, "schedule": "zb-h1"},
    "PP2xDP2 zbv": {"pp": 2, "dp": 2, "schedule": "zbv"},
    "EP2xDP4": {"dp": 4, "ep": 2},
}
# half of the parameters, the embedding and the first block among them: nothing before the second block has a gradient
FROZEN = ("embed.*", "positions.*", "layers.0.*", "layers.1.attention.*", "layers.3.mlp.*", "norm.*")

AXES = {
    "layout": tuple(LAYOUTS),
    "zero": (0, 1, 2, 3),
    "model": ("gpt", "llama-tied", "experts", "predictions"),  # the first two are tied
    "accumulation": (1, 3),
    "overlap": (True, False),
    "frozen": (False, True),
    "recompute": ("none", "full"),
    "offload": (False, True),
    "live": (0, 20_000, 10**9),  # weights that stay gathered, gradients that wait: none, one stage of two, all
}


def legal(choice: Choice) -> bool:
    """Without shards there are no copies of them, without experts nothing to put on other ranks."""
    dense = "EP" in choice["layout"] and choice["model"] not in ("experts", "predictions")
    return not dense and not ("copies" in choice["layout"] and choice["zero"] == 0)


def case_of(choice: Choice) -> Case:
    """Two steps of `accumulation` microbatches on every data-parallel rank."""
    sizes = LAYOUTS[choice["layout"]]
    overlap, zero = choice["overlap"], choice["zero"]
    away = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0 if zero == 3 else 0.5}
    layout = Layout(
        **sizes,  # type: ignore[arg-type]
        zero=zero,
        recompute=choice["recompute"],
        make_vocab_size_divisible_by=8,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        ddp_bucket_size=3000,
        max_live_parameters=choice["live"],
        max_live_gradients=choice["live"],
        **({**away, "offload_weights": zero == 3, "offload_gradients": zero == 3} if choice["offload"] else {}),
    )
    frozen = FROZEN if choice["frozen"] else ()
    batch = 4 * choice["accumulation"]
    return Case(MODELS[choice["model"]], layout, 16, 4 // layout.dp, batch, steps=2, frozen=frozen)
