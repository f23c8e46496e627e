"""The verdict itself: what `compare` lets pass and what it does not, and the data it is asked about."""

from __future__ import annotations

import copy

import pytest
import torch

from isotron.core.mesh import ALONE
from isotron.train.verify import Case, Measured, compare, microbatches, sample
from tests.matrix import AXES, MODELS, as_reference, case_of, faults


def measured() -> Measured:
    weights = {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor([0.5]).double()}
    return Measured([3.0, 2.0], [1.0, 1.0], copy.deepcopy(weights), copy.deepcopy(weights), copy.deepcopy(weights))


def test_equal_measurements_pass() -> None:
    rows = compare(measured(), measured())
    assert len(rows) == 2 + 3 * 2 and all(row.passes for row in rows)


@pytest.mark.parametrize("kind, what", [("gradients", "gradient a"), ("weights", "weight a"), ("initial", "initial a")])
def test_one_wrong_element_is_named(kind: str, what: str) -> None:
    found = measured()
    getattr(found, kind)["a"][1] += 4e-9
    assert [line.split(":")[0] for line in faults(found, measured())] == [what]
    assert faults(found, measured(), tolerance=1e-8) == []


def test_what_is_missing_not_a_number_or_unequal_does_not_pass() -> None:
    for change in (
        lambda m: m.gradients.pop("a"),
        lambda m: m.gradients.update(c=torch.zeros(1)),
        lambda m: m.weights.update(a=torch.full((2,), torch.nan)),
        lambda m: m.weights.update(a=torch.zeros(3)),
        lambda m: m.losses.append(1.0),
        lambda m: m.losses.__setitem__(0, float("nan")),
        lambda m: m.norms.__setitem__(1, 1.1),
        lambda m: m.differing.append("a"),
    ):
        found = measured()
        change(found)
        assert len(faults(found, measured())) == 1


def test_a_tiny_gradient_is_held_against_the_others() -> None:
    """A gradient that ought to be zero may be off by rounding of the large ones, not more."""
    found, want = measured(), measured()
    want.gradients["b"][0], found.gradients["b"][0] = 0.0, 1e-13
    assert faults(found, want) == []
    found.gradients["b"][0] = 1e-11
    assert faults(found, want)


def test_samples_have_unequal_numbers_of_tokens() -> None:
    case = case_of({axis: values[0] for axis, values in AXES.items()})
    counts = [int(sample(case, i)[1].sum()) for i in range(8)]
    assert counts[3] == counts[7] == 0 and len(set(counts)) > 3
    assert as_reference(case).micro_batch == 1


def test_successive_steps_see_successive_samples() -> None:
    case = Case(MODELS["gpt"], None, sequence=16, global_batch=2, batch_multiples=(2, 1, 3))  # type: ignore[arg-type]
    steps = [[int(i) for b in microbatches(case, step, ALONE) for i in b.sample_ids] for step in range(4)]
    assert steps == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15]]
