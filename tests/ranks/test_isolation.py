"""Documents in a row do not see one another: perturbed in every core, stage and split, and run apart.

A row of 16 slots holds documents of 3, 7, 5 and 1 tokens, another one of 9 and 7: borders lie inside the chunks of a
zigzag cut and between them. A change in one document must leave every other token's output bitwise as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.mistral_config import MistralConfig
from isotron.core.parallel.plan import Layout
from isotron.train.verify import Case
from tests.ranks.bodies import build

LENGTHS = ((3, 7, 5, 1), (9, 7))
MODELS = {
    "gqa": LlamaConfig(4, 32, 8, 2, 0, 48, 131, 16),
    "window": MistralConfig(4, 32, 8, 4, 0, 48, 131, 16, sliding_window=4),
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


def losses(case: Case, batch: Batch, lengths: Sequence[Sequence[int]] = LENGTHS) -> Tensor:
    """The loss of each document, one after the other; the same on every rank."""
    model = build(case)
    found = []
    for b, row in enumerate(lengths):
        start = 0
        for n in row:
            mask = torch.zeros(batch.shape)
            mask[b, start : start + n] = 1
            start += n
            found += model.sum_terms(model.evaluate([replace(batch, loss_mask=mask)]), ["loss"])
    return torch.tensor(found)


def apart(case: Case, batch: Batch) -> Tensor:
    """The same from rows that hold one document each."""
    found = []
    for b, row in enumerate(LENGTHS):
        start = 0
        for n in row:
            part = slice(start, start + n)
            fields = (getattr(batch, k)[b : b + 1, part] for k in ("tokens", "labels", "loss_mask", "positions"))
            found.append(losses(case, Batch(*fields, torch.tensor([b])), [[n]]))
            start += n
    return torch.cat(found)


def both(case: Case) -> tuple[Tensor, Tensor]:
    batch = rows()
    changed = batch.tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 131  # the second token of the second document
    return losses(case, batch), losses(case, replace(batch, tokens=changed))


def case_of(model: str, split: str) -> Case:
    layout = Layout(**{"dp": 1, "make_vocab_size_divisible_by": 8, **SPLITS[split]})
    return Case(MODELS[model], layout, 16, 2, 2, steps=1)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("model", ["gqa", "window"])
def test_a_change_stays_in_its_document(ranks: Callable[..., list[Any]], model: str, split: str) -> None:
    case = case_of(model, split)
    before, after = ranks(case.layout.world, both, case)[0]
    assert (before != after).tolist() == [False, True, False, False, False, False]
    if split == "alone":
        assert torch.allclose(before, apart(case, rows()).to(before), rtol=1e-12)
    else:
        alone = losses(case_of(model, "alone"), rows())
        assert torch.allclose(before, alone, rtol=1e-12)
