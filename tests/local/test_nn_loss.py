"""The chunked loss against plain cross-entropy: values, gradients, masks, weights, split vocabularies, 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from isotron.core.errors import Refused
from isotron.core.nn import logits, products
from isotron.core.nn.linear import GradSink
from isotron.core.nn.loss import Head, _LinearCrossEntropy

B, S, D, V = 2, 40, 6, 11
LABELS = torch.arange(B * S).remainder(V).view(B, S)
MASK = (torch.arange(B * S).remainder(3) > 0).float().view(B, S)


@pytest.fixture(params=[64 << 20, 1])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk, and chunks of 16 tokens in blocks of one, multiplied with the vocabulary 7 rows at a time."""
    monkeypatch.setattr(logits, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(logits, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(products, "HOST_ROWS", 7 if request.param == 1 else products.HOST_ROWS)


def head(rows: int = V, dtype: torch.dtype = torch.float64) -> Head:
    made = Head(D, rows).to(dtype)
    made.weight.data = torch.randn(rows, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return made


def hidden(dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(B, S, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def plain(x: Tensor, w: Tensor, mask: Tensor = MASK) -> Tensor:
    each = cross_entropy((x.double() @ w.double().t()).flatten(0, 1), LABELS.flatten(), reduction="none")
    return (each * mask.flatten()).sum()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("sink", [True, False])
def test_value_and_gradients(sink: bool) -> None:
    h, x = head(), hidden()
    want = torch.autograd.grad(plain(x, h.weight) * 0.3, (x, h.weight))
    if sink:
        h.weight.grad_sink = GradSink(torch.full_like(h.weight.data, torch.nan))
    total = h(x, LABELS, MASK, 0.3)
    assert torch.allclose(total, plain(x, h.weight), rtol=1e-12)
    total.backward(torch.tensor(0.3, dtype=torch.float64))
    got = (x.grad, h.weight.grad_sink.buffer if sink else h.weight.grad)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(got, want, strict=True))
    assert not sink or h.weight.grad is None


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_gradcheck(cap: float) -> None:
    h = head()
    h.softcap = cap
    check = lambda x, w, b: _LinearCrossEntropy.apply(x, w, b, LABELS, MASK, 1.0, h)  # noqa: E731
    bias = torch.linspace(-1, 1, len(h.weight), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(check, (hidden(), h.weight, bias))


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_a_frozen_side_gets_nothing(frozen: str) -> None:
    h, x = head(), hidden()
    want = torch.autograd.grad(plain(x, h.weight), (x, h.weight))
    (x if frozen == "x" else h.weight).requires_grad_(False)
    h(x, LABELS, MASK).backward()
    got = (x.grad, h.weight.grad)
    assert [g is None for g in got] == [frozen == "x", frozen == "w"]
    assert all(g is None or torch.allclose(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.usefixtures("chunks")
def test_a_second_microbatch_adds_to_the_sink() -> None:
    h, x = head(), hidden()
    (want,) = torch.autograd.grad(2 * plain(x, h.weight), h.weight)
    h.weight.grad_sink = GradSink(torch.full_like(h.weight.data, torch.nan))
    for _ in range(2):
        h(x, LABELS, MASK, 1.0).backward()
    assert torch.allclose(h.weight.grad_sink.buffer, want)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("kept", [0, 2 * 16 * V * 8, 64 << 20], ids=["nothing", "two chunks", "all"])
def test_a_weight_gradient_put_off_is_the_same_to_the_bit(kept: int) -> None:
    """What is formed again in its own action, and what was kept for it; a cap and padding rows too."""
    buffers = []
    for defers in (False, True):
        h, x = head(rows=V + 5), hidden()
        h.real, h.softcap, h.kept_bytes = V, 1.5, kept
        sink = h.weight.grad_sink = GradSink(torch.full_like(h.weight.data, torch.nan))
        sink.defers, sink.later = defers, [] if defers else None
        h(x, LABELS, MASK, 0.3).backward(torch.tensor(0.3, dtype=torch.float64))
        assert len(sink.later or []) == defers and sink.fresh == defers
        for work in sink.later or []:
            work()
        buffers.append(sink.buffer)
    assert torch.equal(*buffers) and buffers[0].any()


@pytest.mark.usefixtures("chunks")
def test_padding_rows_take_no_part() -> None:
    h, x = head(rows=V + 5), hidden()
    h.real = V
    h.weight.data[V:] = 50.0  # would win every softmax
    assert torch.allclose(h(x, LABELS, MASK), plain(x, h.weight[:V]))
    h(x, LABELS, MASK).backward()
    assert not h.weight.grad[V:].any() and h.weight.grad[:V].any()
    assert h.logits(x).shape == (B, S, V)


def test_masked_tokens_take_no_part_whatever_they_hold() -> None:
    h, x = head(), hidden()
    labels = torch.where(MASK > 0, LABELS, -100)
    h(x, labels, MASK).backward()
    want = torch.autograd.grad(plain(x, h.weight), (x, h.weight))
    assert torch.allclose(x.grad, want[0]) and torch.allclose(h.weight.grad, want[1])
    assert not x.grad[MASK == 0].any()
    nothing = h(x, labels, torch.zeros(B, S))
    assert nothing == 0


def test_a_loss_near_zero_keeps_its_digits() -> None:
    """Where the right token is nearly certain the gradient is p - 1, tiny, and not rounded to zero."""
    h, x = head(), hidden()
    h.weight.data.zero_()
    h.weight.data[3, 0] = 40.0
    x.data[:] = 0
    x.data[..., 0] = 1.0
    labels = torch.full_like(LABELS, 3)
    h(x, labels, torch.ones(B, S)).backward()
    exact = -(V - 1) * torch.exp(torch.tensor(-40.0, dtype=torch.float64)) * 40.0  # (p - 1) w, to first order
    assert torch.allclose(x.grad[..., 0], exact.expand(B, S), rtol=1e-6)


class Meeting:
    """Threads stand for ranks: `gather` stacks what each brings."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.box = Barrier(ranks), [torch.empty(0)] * ranks

    def socket(self, index: int, first: int) -> Any:
        def gather(x: Tensor) -> Tensor:
            self.box[index] = x
            self.barrier.wait(10)
            stacked = torch.stack(self.box)
            self.barrier.wait(10)
            return stacked

        return type("Socket", (), {"first": first, "gather": staticmethod(gather)})()


def in_threads(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * ranks

    def run(i: int) -> None:
        results[i] = work(i)

    threads = [Thread(target=run, args=(i,)) for i in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_split_vocabulary(dtype: torch.dtype, later: bool) -> None:
    """Rows 0-3, 4-7, 8-10 and one of padding, and a rank with padding only."""
    full, meeting = head(dtype=dtype), Meeting(4)
    w, x = full.weight.data, hidden(dtype)
    want_loss = plain(x, w)
    want = torch.autograd.grad(plain(x, full.weight), (x, full.weight))

    def rank(i: int) -> tuple[Tensor, Tensor, Tensor]:
        real = (4, 4, 3, 0)[i]
        part = Head(D, 4).to(dtype)
        part.weight.data = torch.zeros(4, D, dtype=dtype)
        part.weight.data[:real] = w[4 * i : 4 * i + real]
        part.real = real
        part.vocab = meeting.socket(i, 4 * i if real else torch.iinfo(torch.int32).max)
        mine = x.detach().clone().requires_grad_()
        if later:  # formed again, with nobody met a second time
            sink = part.weight.grad_sink = GradSink(torch.zeros(4, D, dtype=dtype))
            sink.defers, sink.later, part.kept_bytes = True, [], 0
        total = part(mine, LABELS, MASK)
        total.backward()
        if later:
            sink.later[0]()
        return total.detach(), mine.grad, sink.buffer if later else part.weight.grad

    results = in_threads(4, rank)
    loose = 5e-2 if dtype is torch.bfloat16 else 1e-10
    assert all(torch.allclose(t.double(), want_loss, rtol=loose) for t, _, _ in results)
    close(sum(dx.double() for _, dx, _ in results), want[0].double(), loose)
    close(torch.cat([dw for _, _, dw in results[:3]])[:V].double(), want[1].double(), loose)
    assert not results[2][2][3].any() and not results[3][2].any()


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [1.0, 1e-6, 256.0])
def test_sixteen_bits(dtype: torch.dtype, weight: float) -> None:
    h, x = head(dtype=dtype), hidden(dtype)
    want = torch.autograd.grad(plain(x, h.weight) * weight, (x, h.weight))
    h.weight.grad_sink = GradSink(torch.zeros(V, D))
    total = h(x, LABELS, MASK, weight)
    assert total.dtype is torch.float32 and torch.allclose(total.double(), plain(x, h.weight), rtol=2e-2)
    total.backward(torch.tensor(weight))
    assert x.grad.dtype is dtype
    if dtype is torch.bfloat16 or weight > 1e-5:  # float16 holds nothing that small: why the loss is scaled
        close(x.grad.double(), want[0].double(), 3e-2)
        close(h.weight.grad_sink.buffer.double(), want[1].double(), 3e-2)


def test_another_weight_in_backward_is_refused() -> None:
    h = head()
    h.weight.grad_sink = GradSink(torch.zeros_like(h.weight.data))
    total = h(hidden(), LABELS, MASK, 0.5)
    with pytest.raises(Refused, match=r"loss weight of 0.25(.|\n)*weight 0.5 given to forward"):
        total.backward(torch.tensor(0.25, dtype=torch.float64))


def test_evaluation_forms_no_gradients() -> None:
    h = head()
    h.weight.grad_sink = GradSink(torch.full_like(h.weight.data, 7.0))
    with torch.no_grad():
        total = h(hidden().detach(), LABELS, MASK)
    assert torch.allclose(total, plain(hidden(), h.weight))
    assert h.weight.grad_sink.fresh and (h.weight.grad_sink.buffer == 7).all()
