"""Documents of a global batch dealt to groups of 1, 2 and 4 ranks: the numbers of one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from isotron.core.mesh import ALONE
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.mistral_config import MistralConfig
from isotron.core.parallel.dealt import documents, joined_rows
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case, measure, microbatches
from tests.context_matrix import MODELS
from tests.matrix import faults, reference_of
from tests.ranks.bodies import build

GPT = GPTConfig(2, 32, 8, vocab_size=131, max_position_embeddings=16, hidden_dropout=0.0, attention_dropout=0.0)
WINDOW = MistralConfig(2, 32, 8, 4, 0, 48, 131, 16, sliding_window=5)
BASE = Layout(
    dp=4, hybrid_context_parallel=True, hybrid_costs=(1.0, 0.01), make_vocab_size_divisible_by=8, ddp_bucket_size=3000
)

# two documents per row, 5 and 11 slots: with 4 slots on a rank on 2 and 4 ranks, with 6 on 1 and 2, with 16 where the
# work is equal
CASES = {
    "4 slots": Case(MODELS["gqa"], replace(BASE, max_seqlen_per_dp_cp_rank=4), 16, 1, 4, steps=2, isolate=True),
    "6 slots, gathered, cp 2": Case(
        WINDOW,
        replace(BASE, dp=2, cp=2, max_seqlen_per_dp_cp_rank=6, cp_comm_type=("allgather",), zero=1),
        16, 1, 4, steps=2, isolate=True,
    ),
    "16 slots, TP with SP": Case(
        replace(MODELS["gqa"], softmax_type="learnable"),
        replace(BASE, dp=2, tp=2, sequence_parallel=True, max_seqlen_per_dp_cp_rank=16, recompute="full"),
        16, 2, 4, steps=2, isolate=True,
    ),
    "as few documents as rows: shared by all": Case(
        MODELS["gqa"],
        replace(BASE, hybrid_costs=(1.0, 0.01, 64.0), max_seqlen_per_dp_cp_rank=4), 16, 1, 4, steps=2, isolate=True,
    ),
    "whole rows, a step without tokens": Case(
        GPT, replace(BASE, dp=2, max_seqlen_per_dp_cp_rank=8, zero=0), 16, 1, 4, steps=2, masked_steps=(1,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_one_process(ranks: Callable[..., list[Any]], name: str) -> None:
    case = CASES[name]
    bad = faults(ranks(case.layout.world, measure, case, timeout=120)[0], reference_of(case))
    assert not bad, "\n".join(bad[:8])


def group_sizes(case: Case) -> list[tuple[int, int, float]]:
    """(ranks, slots, tokens that count) of this rank's microbatches, and what is evaluated of them."""
    model = build(case)
    batches = model.deal(microbatches(replace(case, micro_batch=1), 0, model.mesh.group("tp")))
    assert model.count_tokens(batches) > 0
    return [(len(b.part.runs), b.shape[1], float(b.loss_mask.sum())) for b in batches if b.part is not None]


def test_groups_and_rows(ranks: Callable[..., list[Any]]) -> None:
    found = ranks(4, group_sizes, CASES["4 slots"])
    assert all({size for size, _, _ in mine} == {2, 4} for mine in found)
    assert all(slots <= 4 for mine in found for _, slots, _ in mine)
    rows = joined_rows(microbatches(replace(CASES["4 slots"], micro_batch=1), 0, ALONE))
    assert sum(tokens for mine in found for _, _, tokens in mine) == float(rows.loss_mask.sum())
    assert {p.length for p in documents(rows)} == {5, 11}
