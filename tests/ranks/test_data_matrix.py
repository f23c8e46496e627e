"""Rows from data files in every layout against one process: loss, norm, every gradient, weights, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isotron.core.batch import Batch
from isotron.data.batches import microbatches
from tests.covering import Case as Choice
from tests.covering import covering, product_of, uncovered
from tests.data_matrix import AXES, EOD, LAYOUTS, OPTIONS, FromFiles, case_of, dataset, legal, write_files
from tests.matrix import equals_one_process

PAIRS = covering(AXES, legal)
REST = [choice for choice in product_of({**AXES, "layout": tuple(LAYOUTS)}, legal) if choice not in PAIRS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("rows")
    write_files(place)
    return str(place)


def name_of(choice: Choice) -> str:
    return "-".join(f"{k}{v}" if k in ("zero", "microbatch") else str(v) for k, v in choice.items())


def test_every_pair_of_features_is_covered() -> None:
    assert uncovered(PAIRS, AXES, legal) == set()


@pytest.mark.parametrize("choice", PAIRS, ids=name_of)
def test_pairs(ranks: Callable[..., list[Any]], choice: Choice, folder: str) -> None:
    equals_one_process(ranks, case_of(choice, folder), name_of(choice))


@pytest.mark.slow
@pytest.mark.parametrize("choice", sorted(REST, key=lambda c: case_of(c, "").layout.world), ids=name_of)
def test_full_product(ranks: Callable[..., list[Any]], choice: Choice, folder: str) -> None:
    equals_one_process(ranks, case_of(choice, folder), name_of(choice))


def rows_of(batches: list[Batch]) -> dict[int, list[Any]]:
    """Everything of each row by the number of its sample."""
    found = {}
    for batch in batches:
        for i, number in enumerate(batch.sample_ids.tolist()):
            parts = (batch.tokens, batch.labels, batch.loss_mask, batch.positions, batch.doc_ids)
            found[number] = [None if part is None else part[i].tolist() for part in parts]
    return found


@pytest.mark.parametrize("rows", OPTIONS)
def test_a_row_depends_on_its_number_alone(rows: str, folder: str) -> None:
    """However many ranks and rows in a microbatch: the same 24 rows, each once; and what is said to be done is done."""
    source = FromFiles(folder, rows)
    data, config = dataset(folder, source.config), source.config
    expected = rows_of([source(range(24))])
    for dp, micro in ((1, 1), (2, 3), (4, 2), (3, 4)):
        ranks = [microbatches(data, 0, 24, micro, d, dp, config, EOD) for d in range(dp)]
        assert rows_of([batch for batches in ranks for batch in batches]) == expected
    every = source(range(24))
    if "pack_documents" in OPTIONS[rows]:
        assert every.doc_ids is not None and int(every.doc_ids.max()) > 0 and 0 < float(every.loss_mask.mean()) < 1
    if "fim_rate" in OPTIONS[rows]:
        assert int(torch.isin(every.tokens, torch.tensor(config.fim_token_ids)).sum()) > 24
