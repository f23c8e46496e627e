"""The float64 matrix of the pipeline schedules: every schedule with every feature that meets it, against one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isotron.core.models.gemma2_config import Gemma2Config
from isotron.core.models.olmo2_config import Olmo2Config
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case, Measured, measure
from tests.matrix import MODELS, faults, reference_of
from tests.moe_matrix import MODELS as EXPERTS

Ranks = Callable[..., list[Any]]
OLMO = Olmo2Config(2, 32, 4, 2, 16, 48, 131, 16)
GEMMA = Gemma2Config(2, 32, 8, 2, 12, 48, 131, 16, sliding_window=7, attn_logit_softcapping=2.0)

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {"vpp": 2},
    "interleaved-group3": {"schedule": "interleaved", "vpp": 2, "microbatch_group": 3},
    "interleaved-group1": {"schedule": "interleaved", "vpp": 2, "microbatch_group": 1},
    "breadth-first": {"vpp": 2},
    "zb-h1": {},
    "zb-h2": {},
    "zbv": {},
    "v-half": {},
    "v-min": {},
    "dualpipev": {},
    "searched": {"schedule": "auto", "schedule_memory": 2.0, "schedule_costs": (10, 14, 11, 2)},
    "searched-v": {"schedule": "auto", "vpp": 2, "schedule_memory": 2.0},
}
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "TP2": ("gpt", {"tp": 2}),
    "SP": ("llama", {"tp": 2, "sequence_parallel": True, "deferred_logits": 0}),
    "DP2-zero1": ("gpt", {"dp": 2, "zero": 1}),
    "recompute": ("llama", {"recompute": "full", "recompute_num_layers": 2, "recompute_keep": 1}),
    "selective": ("gpt", {"recompute": "selective"}),
    "tied": ("llama-tied", {"dp": 2, "zero": 1}),
    "uneven": ("gpt", {"uneven": True}),
}
FOUR = ("TP2", "SP", "recompute", "selective")  # microbatches; the others have three


def case_of(schedule: str, feature: str) -> Case:
    """Four microbatches or an odd three on two pipeline ranks, then one."""
    model, wanted = FEATURES[feature]
    sizes = {"schedule": schedule, **SCHEDULES[schedule], **wanted}
    uneven = sizes.pop("uneven", False)
    sizes = {"dp": 1, "pp": 2, "make_vocab_size_divisible_by": 8, "ddp_bucket_size": 3000, **sizes}
    layout = Layout(**sizes)
    if uneven:
        counts = (1, 4) if layout.stages == 2 else (0, 3, 1, 1)
        layout = Layout(**sizes, layers_per_stage=counts)
    return Case(MODELS[model], layout, 16, 1, layout.dp, steps=2, batch_multiples=(4 if feature in FOUR else 3, 1))


# in every run each schedule meets a split of tensors, copies or ties over ranks, and one more; all pairs when asked
KINDS = (("TP2", "SP"), ("DP2-zero1", "tied"), ("recompute", "selective", "uneven", "plain"))
OFTEN = {(s, kind[(i // 2**k) % len(kind)]) for i, s in enumerate(SCHEDULES) for k, kind in enumerate(KINDS)}
EVERY = [
    pytest.param(s, f, marks=() if (s, f) in OFTEN else pytest.mark.slow, id=f"{s}-{f}")
    for s in SCHEDULES
    for f in FEATURES
]


def test_every_feature_is_met_often() -> None:
    met = [f for _, f in OFTEN]
    assert len(OFTEN) == 3 * len(SCHEDULES) and min(met.count(f) for f in FEATURES) >= 2


@pytest.mark.parametrize(("schedule", "feature"), EVERY)
def test_a_schedule_equals_one_process(ranks: Ranks, schedule: str, feature: str) -> None:
    case = case_of(schedule, feature)
    found: Measured = ranks(case.layout.world, measure, case, timeout=120)[0]
    assert found.differing == []
    bad = faults(found, reference_of(case))
    assert not bad, "\n".join(bad[:8])


@pytest.mark.parametrize("schedule", ["zbv", "v-min", "dualpipev", "zb-h2", "breadth-first"])
def test_four_pipeline_ranks(ranks: Ranks, schedule: str) -> None:
    layout = Layout(dp=1, pp=4, schedule=schedule, make_vocab_size_divisible_by=8, **SCHEDULES[schedule])
    case = Case(MODELS["llama-tied"], layout, 16, 1, 1, steps=2, batch_multiples=(9, 2))
    found: Measured = ranks(4, measure, case, timeout=120)[0]
    assert not faults(found, reference_of(case)) and found.differing == []


FURTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "zbv-zero3": (MODELS["gpt"], {"schedule": "zbv", "dp": 2, "zero": 3, "deferred_logits": 0}),
    "dualpipev-zero2": (MODELS["llama-tied"], {"schedule": "dualpipev", "dp": 2, "zero": 2, "deferred_logits": 0}),
    "zb-h1-cp2": (MODELS["llama"], {"schedule": "zb-h1", "cp": 2}),
    "zbv-experts": (EXPERTS["groups"], {"schedule": "zbv", "ep": 2, "dp": 2, "layers_per_stage": (1, 0, 1, 1)}),
    "mtp-uneven": (EXPERTS["mla"], {"layers_per_stage": (2, 0)}),
    "mtp-interleaved": (EXPERTS["mla"], {"schedule": "interleaved", "vpp": 2, "layers_per_stage": (1, 0, 1, 0)}),
    "mtp-zbv": (EXPERTS["mla"], {"schedule": "zbv", "layers_per_stage": (0, 1, 1, 0)}),
    "mtp-zb-h2": (EXPERTS["mla"], {"schedule": "zb-h2", "deferred_logits": 0}),
    "searched-own-costs": (EXPERTS["global"], {"schedule": "auto", "schedule_memory": 2.0, "vpp": 2,
                                                "layers_per_stage": (0, 1, 1, 1)}),
    "halves-experts": (EXPERTS["groups"], {"schedule": "zb-h1", "ep": 2, "dp": 2, "layers_per_stage": (0.5, 2.5)}),
    "halves-mtp-zbv": (EXPERTS["mla"], {"schedule": "zbv", "layers_per_stage": (0.5, 0, 0.5, 1)}),
    "halves-norms-behind": (OLMO, {"dp": 2, "zero": 3, "recompute": "selective", "layers_per_stage": (0.5, 1.5)}),
    "halves-sandwich-cp2": (GEMMA, {"cp": 2, "cp_comm_type": ("p2p", "a2a"), "schedule": "zb-h2",
                                    "layers_per_stage": (1.5, 0.5), "recompute": "full", "recompute_num_layers": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", FURTHER)
def test_further_features(ranks: Ranks, name: str) -> None:
    """Sharded weights, split sequences, experts, modules behind the last block; costs counted from the model."""
    model, sizes = FURTHER[name]
    layout = Layout(**{"dp": 1, "pp": 2, "make_vocab_size_divisible_by": 8, "ddp_bucket_size": 3000, **sizes})
    case = Case(model, layout, 16, 1, 4 * layout.dp, steps=2)
    found: Measured = ranks(layout.world, measure, case, timeout=120)[0]
    assert not faults(found, reference_of(case)) and found.differing == []


def test_a_table_of_ones_own_with_a_late_weight_gradient(ranks: Ranks, tmp_path: Path) -> None:
    """A bucket must not be reduced with a stage's last backward while an earlier weight gradient is still to come."""
    file = tmp_path / "mine.csv"
    file.write_text("F0.0,F0.1,B0.0,B0.1,W0.0\nF1.0,B1.0,F1.1,B1.1,W1.0\n", encoding="utf-8")
    layout = Layout(dp=2, pp=2, schedule=str(file), make_vocab_size_divisible_by=8, ddp_bucket_size=1500)
    case = Case(MODELS["gpt"], layout, 16, 1, 4, steps=3)
    found: Measured = ranks(4, measure, case, timeout=120)[0]
    assert not faults(found, reference_of(case)) and found.differing == []


@pytest.mark.parametrize("split", [{"layer_split": "balanced"}, {"pipeline_layout": "E|ttt|t|tL"}])
def test_blocks_dealt_by_cost_and_by_string(ranks: Ranks, split: dict[str, str]) -> None:
    layout = Layout(dp=1, pp=2, vpp=2, make_vocab_size_divisible_by=8, **split)  # type: ignore[arg-type]
    case = Case(MODELS["llama"], layout, 16, 1, 4, steps=2)
    found: Measured = ranks(2, measure, case, timeout=120)[0]
    assert not faults(found, reference_of(case))
