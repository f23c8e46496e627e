"""Documents in a row do not see one another: perturbed in every core, stage and split, and run apart.

A row of 16 slots holds documents of 3, 7, 5 and 1 tokens, another one of 9 and 7: borders lie inside the chunks of a
zigzag cut and between them. A change in one document must leave every other token's output bitwise as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.mistral_config import MistralConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.ranks.bodies import build

LENGTHS = ((3, 7, 5, 1), (9, 7))
CHANGED = ((0, 1),)  # row, document
OTHERS = (((0, 0), (0, 2), (0, 3)), ((1, 0), (1, 1)))  # of the same row, of the other one
MODELS = {
    "gqa": LlamaConfig(4, 32, 8, 2, 0, 48, 131, 16),
    "window": MistralConfig(4, 32, 8, 4, 0, 48, 131, 16, sliding_window=4),
}
# both kinds of tiles where blocks of other ranks are met, one where a split changes nothing about them
ALWAYS = {
    "gqa": ("alone", "PP4", "TP2+SP", "CP2", "CP4 over heads"),
    "window": ("alone", "unfused", "CP2 gathered", "CP4 in two levels"),
}
SPLITS: dict[str, dict[str, Any]] = {
    "alone": {},
    "unfused": {"attention_backend": "unfused"},
    "PP4": {"pp": 4},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "CP2": {"cp": 2},
    "CP2 gathered": {"cp": 2, "cp_comm_type": ("allgather",)},
    "CP4 over heads": {"cp": 4, "cp_comm_type": ("a2a",)},
    "CP4 in two levels": {"cp": 4, "cp_comm_type": ("a2a+p2p",), "hierarchical_cp_sizes": (2, 2)},
}


def rows() -> Batch:
    tokens = torch.randint(0, 131, (2, 17), generator=torch.Generator().manual_seed(5))
    docs = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in LENGTHS])
    positions = torch.stack([torch.cat([torch.arange(m) for m in n]) for n in LENGTHS])
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(2, 16), positions, torch.arange(2), docs)


def span(row: int, document: int) -> slice:
    start = sum(LENGTHS[row][:document])
    return slice(start, start + LENGTHS[row][document])


def losses(model: ParallelModel, batch: Batch) -> Tensor:
    """The loss of the document that is changed, of the others of its row, and of those of the other row."""
    masks = []
    for documents in (CHANGED, *OTHERS):
        mask = torch.zeros(batch.shape)
        for row, document in documents:
            mask[row, span(row, document)] = 1
        masks.append(mask)
    return torch.tensor([total(model, replace(batch, loss_mask=mask)) for mask in masks], dtype=torch.float64)


def total(model: ParallelModel, batch: Batch) -> float:
    return model.sum_terms(model.evaluate([batch]), ["loss"])[0]


def apart(case: Case) -> Tensor:
    """The same from rows that hold one document each."""
    model, batch = build(case), rows()

    def alone(row: int, document: int) -> float:
        part = span(row, document)
        fields = (getattr(batch, k)[row : row + 1, part] for k in ("tokens", "labels", "loss_mask", "positions"))
        return total(model, Batch(*fields, torch.tensor([row])))

    sums = (sum(alone(*where) for where in documents) for documents in (CHANGED, *OTHERS))
    return torch.tensor(list(sums), dtype=torch.float64)


def both(case: Case) -> tuple[Tensor, Tensor]:
    model, batch = build(case), rows()
    changed = batch.tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 131  # the second token of the second document
    return losses(model, batch), losses(model, replace(batch, tokens=changed))


def case_of(model: str, split: str) -> Case:
    layout = Layout(**{"dp": 1, "make_vocab_size_divisible_by": 8, **SPLITS[split]})
    return Case(MODELS[model], layout, 16, 2, 2, steps=1)


@cache
def expected(model: str) -> Tensor:
    return apart(case_of(model, "alone"))


def check(ranks: Callable[..., list[Any]], model: str, split: str) -> None:
    case = case_of(model, split)
    before, after = ranks(case.layout.world, both, case)[0]
    assert (before != after).tolist() == [True, False, False]
    assert torch.allclose(before, expected(model), rtol=1e-12)


@pytest.mark.parametrize(("model", "split"), [(m, s) for m, splits in ALWAYS.items() for s in splits])
def test_a_change_stays_in_its_document(ranks: Callable[..., list[Any]], model: str, split: str) -> None:
    check(ranks, model, split)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "split"), [(m, s) for m in MODELS for s in SPLITS if s not in ALWAYS[m]])
def test_in_every_other_split(ranks: Callable[..., list[Any]], model: str, split: str) -> None:
    check(ranks, model, split)
