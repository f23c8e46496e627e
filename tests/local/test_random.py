"""Numbers as a function of (seed, name, coordinate): slices equal the whole, masks are uniform and independent."""

from __future__ import annotations

import math

import pytest
import torch

from isotron.core import random
from isotron.core.layout import Box, Piece, whole
from isotron.core.nn.dropout import Dropout
from isotron.core.random import TILE, keep_mask, key, normal, normal_pieces, uniform


@pytest.mark.parametrize("shape", [(7,), (600,), (300, 520), (2, 300, 260), (2, 3, 4, 5)])
def test_any_slice_equals_the_whole(shape: tuple[int, ...]) -> None:
    full = normal(shape, 1, "w")
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        start = tuple(int(torch.randint(0, n, (), generator=generator)) for n in shape)
        size = tuple(
            int(torch.randint(1, n - o + 1, (), generator=generator)) for o, n in zip(start, shape, strict=True)
        )
        at = (1,) * len(shape)
        out = torch.full(tuple(n + 2 for n in size), torch.nan)
        normal_pieces(out, [Piece(Box(start, size), Box(at, size))], shape, 1, "w")
        inside = Box(at, size).slices()
        assert torch.equal(out[inside], full[Box(start, size).slices()])
        out[inside] = torch.nan
        assert out.isnan().all()  # nothing outside the box was touched


def test_a_rank_draws_no_more_than_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: drawn.append(math.prod(a[0])) or draw(*a, **k))
    box = Box((0, 0), (TILE, TILE))
    normal_pieces(torch.empty(TILE, TILE), [Piece(box, whole(box.shape))], (40 * TILE, 40 * TILE), 1, "w")
    assert drawn == [TILE * TILE]


def test_numbers_are_normal_and_depend_on_seed_and_name() -> None:
    x = normal((512, 512), 1, "w")
    assert abs(x.mean()) < 5 / 512 and abs(x.std() - 1) < 5 / 512
    assert abs((x[:, :-1] * x[:, 1:]).mean()) < 5 / 512  # neighbours, also over the edges of tiles
    assert abs((x[:256] * x[256:]).mean()) < 8 / 512  # tiles
    for other in (normal((512, 512), 2, "w"), normal((512, 512), 1, "v")):
        assert abs((x * other).mean()) < 5 / 512


def test_keys_are_stable() -> None:
    """A change here would change every run: initial weights and masks follow from these."""
    assert key(1234, "layers.0.mlp.down.weight", 0, 3) == 980390208115460861
    assert 0 <= key(0, "") < 1 << 63
    assert keep_mask(0.5, 7, torch.arange(16)).int().tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0]


def plain_hash(salt: int, *at: int) -> int:
    """The rule in whole numbers."""
    h = salt & 0xFFFFFFFF
    for c in at:
        h = ((h + 0x9E3779B9) * 5 + c * 0x9E3779B1) & 0xFFFFFFFF
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            h = (h ^ h >> shift) * factor & 0xFFFFFFFF
    return h


@pytest.mark.parametrize("block", [1, 1 << 16])
def test_blocks_of_32_bits_follow_the_rule(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Late samples too, in any block, with any of the coordinates varying."""
    monkeypatch.setattr(random, "_BLOCK", block)
    a, b, c = torch.tensor([3, 1 << 40]), torch.arange(4), torch.arange(5)
    salt = key(1, "x")
    want = torch.tensor([[[plain_hash(salt, int(i), int(j), int(k)) for k in c] for j in b] for i in a])
    assert torch.equal(uniform(salt, a[:, None, None], b[:, None], c), (want >> 8).float() / (1 << 24))
    assert torch.equal(keep_mask(0.3, salt, a[:, None, None], b[:, None], c), want >= int(0.3 * (1 << 32)))
    pairs = torch.tensor([plain_hash(salt, int(j), 7) for j in b])
    assert torch.equal(keep_mask(0.6, salt, b, torch.tensor(7)), pairs >= int(0.6 * (1 << 32)))


def coordinates(*shape: int) -> list[torch.Tensor]:
    return list(torch.meshgrid(*map(torch.arange, shape), indexing="ij"))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_masks_keep_with_the_right_probability_everywhere(p: float) -> None:
    n = 1 << 16
    kept = keep_mask(p, 3, *coordinates(16, 64, 64)).double()
    sigma = math.sqrt(p * (1 - p))
    assert abs(kept.mean() - (1 - p)) < 5 * sigma / math.sqrt(n)
    for dims in ((0, 1), (0, 2), (1, 2)) if p < 0.1 else ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        share = kept.mean(dims)
        assert (share - (1 - p)).abs().max() < 6 * sigma * math.sqrt(share.numel() / n)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten() - a.double().mean(), b.double().flatten() - b.double().mean()
    return float((a * b).mean() / (a.std() * b.std())) * math.sqrt(a.numel())  # in standard deviations


def test_masks_of_different_places_are_independent() -> None:
    mask = keep_mask(0.3, 3, *coordinates(16, 64, 64))
    for dim in range(3):
        for step in (1, 2, 4, 8):
            n = mask.shape[dim] - step
            assert abs(correlation(mask.narrow(dim, 0, n), mask.narrow(dim, step, n))) < 5
    a, b, c = coordinates(16, 64, 64)
    assert abs(correlation(mask, keep_mask(0.3, 4, a, b, c))) < 5  # another layer
    assert abs(correlation(mask, keep_mask(0.3, 3, a + 16, b, c))) < 5  # other samples
    assert abs(correlation(mask, keep_mask(0.3, 3, a, c, b))) < 5  # transposed


def test_masks_of_very_late_samples() -> None:
    late = torch.arange(1 << 12) + (1 << 40)
    kept = keep_mask(0.5, 3, late).double()
    assert abs(kept.mean() - 0.5) < 5 * 0.5 / 64
    assert not torch.equal(kept, keep_mask(0.5, 3, late + (1 << 20)).double())


def dropout(p: float, name: str = "d", seed: int = 1) -> Dropout:
    made = Dropout(p, name)
    made.seed = seed
    return made.train()


def test_dropout_scales_and_is_the_identity_in_evaluation() -> None:
    x, ids = torch.ones(4, 32, 64), torch.arange(4)
    y = dropout(0.25)(x, ids)
    assert y.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert abs(y.mean() - 1) < 0.03
    assert torch.equal(dropout(0.25)(x, ids), y)  # the same numbers again
    assert dropout(0.25).eval()(x, ids) is x and dropout(0.0)(x, ids) is x
    assert not torch.equal(dropout(0.25, name="e")(x, ids), y)
    assert not torch.equal(dropout(0.25, seed=2)(x, ids), y)


def test_a_model_with_dropout_can_be_converted() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), dropout(0.5)).double().to("cpu")
    assert layer[0].weight.dtype is torch.float64


def test_a_sample_has_its_mask_in_any_batch_and_slice() -> None:
    ones = torch.ones(3, 16, 8)
    whole_batch = dropout(0.5)(ones, torch.tensor([5, 6, 7]))
    assert torch.equal(dropout(0.5)(ones[:1], torch.tensor([6]))[0], whole_batch[1])
    parts = []
    for i in range(4):
        part = dropout(0.5)
        part.sequence = (i, 4)
        parts.append(part(ones[:, :4], torch.tensor([5, 6, 7])))
    assert torch.equal(torch.cat(parts, 1), whole_batch)
    assert not torch.equal(parts[0], parts[1])


def test_attention_masks_by_head() -> None:
    ones = torch.ones(2, 4, 8, 8)
    ids = torch.tensor([5, 6])
    all_heads = dropout(0.5).on_probabilities(ones, ids)
    parts = []
    for i in range(2):
        part = dropout(0.5)
        part.heads = (i, 2)
        parts.append(part.on_probabilities(ones[:, :2], ids))
    assert torch.equal(torch.cat(parts, 1), all_heads)
    assert not torch.equal(all_heads[:, 0], all_heads[:, 1])
