"""Sampling against a reference in plain Python, and the draws themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isotron.inference.config import Sampling
from isotron.inference.sampling import Draw, choose, draw, own_logprobs, uniform
from isotron.inference.sampling import probabilities as rows_probabilities


def probabilities(logits, sampling):
    return rows_probabilities(logits.double(), [sampling] * len(logits))


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Sort, cut, renormalise, cut, renormalise: by loops."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if 0 < top_p < 1 and kept and mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(max_examples=200, deadline=None)
@given(
    # tenths, so that equal logits occur; prime denominators keep sums of probabilities off the border top_p
    logits=st.lists(st.integers(-60, 60).map(lambda n: n / 10), min_size=1, max_size=40),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.0, 0.1013, 0.5003, 0.9007, 1.0]),
)
def test_top_k_and_top_p(logits, temperature, top_k, top_p):
    found = probabilities(torch.tensor([logits], dtype=torch.float64), Sampling(temperature, top_k, top_p))[0]
    assert found.tolist() == pytest.approx(reference(logits, temperature, top_k, top_p), abs=1e-12)


def test_cuts_by_hand():
    logits = torch.tensor([[math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]])
    near = lambda *p: pytest.approx(p, abs=1e-6)  # noqa: E731
    assert probabilities(logits, Sampling(1.0, 2))[0].tolist() == near(0, 4 / 7, 3 / 7, 0)
    assert probabilities(logits, Sampling(1.0, 0, 0.69))[0].tolist() == near(0, 4 / 7, 3 / 7, 0)
    assert probabilities(logits, Sampling(1.0, 0, 0.71))[0].tolist() == near(0, 4 / 9, 3 / 9, 2 / 9)
    assert probabilities(logits, Sampling(1.0, 0, 1e-9))[0].tolist() == near(0, 1, 0, 0)
    assert probabilities(logits, Sampling(1.0, 3, 0.7))[0].tolist() == near(0, 4 / 7, 3 / 7, 0)  # of 4/9 + 3/9 + 2/9
    assert probabilities(logits, Sampling(1e-30))[0].tolist() == near(0, 1, 0, 0)


def test_equals_are_cut_by_id():
    logits = torch.zeros(1, 8)
    assert probabilities(logits, Sampling(1.0, 3))[0].tolist() == pytest.approx([1 / 3] * 3 + [0] * 5)
    assert int(choose(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), [Draw(Sampling(), 0, [], 0)])) == 1


def test_draw_takes_the_share_in_which_the_number_falls():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    numbers = torch.tensor([0.0, 0.249, 0.25, 0.749, 0.75, 1 - 2**-52], dtype=torch.float64)
    assert draw(p.expand(6, -1), numbers).tolist() == [1, 1, 3, 3, 4, 4]


def test_numbers_are_uniform_and_keyed():
    numbers = torch.tensor([uniform(1, r, p) for r in range(100) for p in range(100)], dtype=torch.float64)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert (torch.histc(numbers, 10, 0, 1) - 1000).abs().max() < 130  # four standard deviations
    assert len({uniform(1, 2, 3), uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4)}) == 4
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


def test_frequencies_follow_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 12, generator=generator).expand(20000, -1)
    sampling = Sampling(0.8, 10, 0.95, seed=5)
    tokens = choose(logits, [Draw(sampling, i, [], 0) for i in range(20000)])
    counts = torch.bincount(tokens, minlength=12).double()
    p = probabilities(logits[:1], sampling)[0]
    assert (counts[p == 0] == 0).all() and (p == 0).sum() >= 2
    kept = p > 0
    chi = ((counts - 20000 * p)[kept] ** 2 / (20000 * p[kept])).sum()
    assert chi < 35  # at most 11 degrees of freedom


def test_log_probabilities_are_the_models_own():
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 0.0, 0.0]])
    for sampling in (Sampling(), Sampling(0.1, 1)):
        tokens = choose(logits, [Draw(sampling, i, [], 0) for i in range(2)])
        logprobs = own_logprobs(logits, tokens)
        assert tokens.tolist() == [2, 0]
        assert logprobs.tolist() == pytest.approx(
            torch.log_softmax(logits.double(), -1)[[0, 1], [2, 0]].tolist(), abs=1e-6
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_numbers_give_no_token(bad, temperature):
    logits = torch.tensor([[0.0, bad], [0.0, 9.0]])
    tokens = choose(logits, [Draw(Sampling(temperature, seed=3), i, [], 0) for i in range(2)])
    assert tokens.tolist()[0] == -1 and tokens.tolist()[1] in (0, 1)


def test_ranges():
    assert not Sampling(0.0, 0, 0.0).problems() and not Sampling(2.0, 50, 1.0).problems()
    assert [str(p).splitlines()[0] for p in Sampling(float("inf"), -1, -0.1).problems()] == [
        "asked:  --temperature inf",
        "asked:  --top-k -1",
        "asked:  --top-p -0.1",
    ]
