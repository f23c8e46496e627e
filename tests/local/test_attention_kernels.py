"""Kernels behind the attention socket: calls of flash libraries, FlexAttention's blocks, and which one is chosen."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isotron.core import device as devices
from isotron.core.batch import Batch
from isotron.core.errors import Refused
from isotron.core.nn import backends, flex
from isotron.core.nn.attention import Causal
from isotron.core.nn.backends import Wanted
from isotron.core.nn.context import Context
from isotron.core.nn.dropout import Dropout
from isotron.core.nn.flash import Flash, PackageCalls, TorchCalls, span_of
from isotron.core.nn.kernels import HostFlash, tiled
from isotron.core.nn.tiles import Kind, tiles
from isotron.core.rows import Cuts, zigzag

B, S, H, K, N = 2, 20, 4, 2, 4
DOCUMENTS: Cuts = ((0, 3, 12, 20), (0, 7, 8, 20))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).requires_grad_()


class Library:
    """The calls of the flash-attn package in plain torch, with the names, order and demands of its arguments."""

    def __init__(self) -> None:
        self.calls = 0

    def _pairs(self, q, k, cu_q, cu_k, left, right, causal):
        """For every sequence: its queries, its keys and which pairs are hidden; the last of both stand together."""
        assert cu_q.dtype == cu_k.dtype == torch.int32 and int(cu_q[-1]) == len(q) and int(cu_k[-1]) == len(k)
        assert q.is_contiguous() and k.is_contiguous() and q.shape[-1] % 8 == 0
        self.calls += 1
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
            far = torch.arange(b - a)[:, None] - torch.arange(d - c) + (d - c) - (b - a)  # keys behind the query
            hidden = (far < -right if right >= 0 else far < -(1 << 30)) | (far > left if left >= 0 else far > 1 << 30)
            yield slice(a, b), slice(c, d), hidden | (far < 0 if causal else False)

    def _scores(self, q, k, scale, softcap, hidden):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        raw = torch.einsum("qhn,khn->hqk", q, k) * scale
        bounded = torch.tanh(raw / softcap) * softcap if softcap else raw
        return bounded.masked_fill(hidden, -torch.inf)

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0,
    ):  # fmt: skip
        assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
        o, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
        for on, over, hidden in self._pairs(q, k, cu_seqlens_q, cu_seqlens_k, window_size_left, window_size_right,
                                            causal):  # fmt: skip
            scores = self._scores(q[on], k[over], softmax_scale, softcap, hidden)
            lse[:, on] = scores.logsumexp(-1)
            o[on] = torch.einsum("hqk,khn->qhn", scores.softmax(-1), v[over].repeat_interleave(2, 1))
        return o, lse, None, None

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # fmt: skip
        assert deterministic and dout.is_contiguous() and out.is_contiguous()
        for x in (dq, dk, dv):
            x.zero_()
        for on, over, hidden in self._pairs(q, k, cu_seqlens_q, cu_seqlens_k, window_size_left, window_size_right,
                                            causal):  # fmt: skip
            qs, ks, vs = (x[part].detach().requires_grad_() for x, part in ((q, on), (k, over), (v, over)))
            with torch.enable_grad():  # with the lse given, the probabilities are a plain function of the scores
                p = (self._scores(qs, ks, softmax_scale, softcap, hidden) - softmax_lse[:, on, None]).exp()
                values = torch.einsum("hqk,khn->qhn", p, vs.repeat_interleave(2, 1))
                delta = (dout[on] * out[on]).sum(-1).t()[..., None]
                (values * dout[on]).sum().sub((p * delta).sum()).backward()
            dq[on], dk[over], dv[over] = qs.grad, ks.grad, self._dv(p.detach(), dout[on])

    @staticmethod
    def _dv(p, dout):
        return torch.einsum("hqk,qhn->khn", p, dout).unflatten(1, (-1, 2)).sum(2)


def core_of(kernel: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Causal:
    if kernel is not None:
        monkeypatch.setattr(backends, "_flash", lambda want: kernel)
    return Causal(Dropout(0.0, "d"), **options)


def outcome(core: Causal, cuts: Cuts | None, sinks: bool) -> list[Tensor]:
    """o and the gradients of q, k, v and sinks."""
    ids = torch.zeros(B, S, dtype=torch.int64)
    docs = None if cuts is None else flex.numbers(cuts, B, S)
    ctx = Context(Batch(ids, ids, torch.ones(B, S), torch.arange(S).expand(B, -1), torch.arange(B), docs))
    given = [numbers(B, H, S, N), numbers(B, K, S, N), numbers(B, K, S, N + 1)[..., :N], *([numbers(H)] * sinks)]
    given = [x.detach().clone().requires_grad_() for x in given]
    o = core(*given[:3], ctx, *given[3:])
    return [o, *torch.autograd.grad((o * numbers(B, H, S, N)).sum(), given)]


@pytest.mark.parametrize("cuts", [None, DOCUMENTS])
@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"softcap": 0.7, "window": 3, "scale": 0.3}, {"causal": False}], ids=str
)
def test_the_flash_package_in_one_call(cuts: Cuts | None, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    scale, softcap = options.get("scale", 0.5), options.get("softcap", 0.0)
    for sinks in (False, True):
        want = outcome(Causal(Dropout(0.0, "d"), **options), cuts, sinks)
        with monkeypatch.context() as patch:
            found = outcome(core_of(Flash(scale, PackageCalls(library), softcap), patch, **options), cuts, sinks)
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, want, strict=True))
    assert library.calls == 4  # forward and backward of each


@pytest.mark.parametrize("window", [0, 3, 9])
def test_tiles_of_a_ring_by_the_flash_package(window: int) -> None:
    """Every kind of tile, with keys of another rank: the span is right where the last query and key stand apart."""
    q, k, v = (numbers(B, heads, 8, N).detach().requires_grad_() for heads in (H, K, K))
    kinds = set()
    for mine, theirs in ((0, 0), (1, 0), (0, 1)):
        plan = tiles(zigzag(mine, 2, 16), zigzag(theirs, 2, 16), ((0, 5, 16),) * B, B, window)
        kinds |= {tile.kind for tile in plan}
        o = [tiled(q, k, v, plan, kernel) for kernel in (HostFlash(0.5), Flash(0.5, PackageCalls(Library())))]
        assert torch.allclose(o[0], o[1], rtol=1e-10)
        up = torch.randn_like(o[0])
        grads = [torch.autograd.grad(x, (q, k, v), up) for x in o]
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*grads, strict=True))
    assert Kind.BAND in kinds if window else kinds == {Kind.CAUSAL, Kind.FULL}


def test_a_host_kernel_without_groups_gets_keys_of_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 has it: its kernel reads and writes behind grouped keys without a word."""
    q, k, v = (numbers(B, heads, 8, N).detach().requires_grad_() for heads in (H, K, K))
    plan, found = tiles(zigzag(0, 1, 8), zigzag(0, 1, 8), None, B, 0), []
    for able in (devices.has_grouped_host_flash(), False):
        monkeypatch.setattr("isotron.core.nn.kernels.has_grouped_host_flash", lambda able=able: able)
        o = tiled(q, k, v, plan, HostFlash(0.5))
        found.append((o, *torch.autograd.grad(o.square().sum(), (q, k, v))))
    whole = [x.repeat_interleave(H // K, 1) for x in (k, v)]
    found.append((torch.nn.functional.scaled_dot_product_attention(q, *whole, is_causal=True, scale=0.5),))
    assert all(torch.allclose(x, found[0][i], rtol=1e-12, atol=1e-14) for f in found for i, x in enumerate(f))


def test_spans_of_tiles() -> None:
    plan = [t for t in tiles(zigzag(1, 2, 16), zigzag(0, 2, 16), None, 1, 6) if t.kind is Kind.BAND]
    assert plan
    for tile in plan:
        left, right = span_of(tile)
        rows, columns = tile.shape
        seen = [[-right <= i - j + columns - rows <= left for j in range(columns)] for i in range(rows)]
        asked = [[0 <= tile.q_at + i - tile.k_at - j < 6 for j in range(columns)] for i in range(rows)]
        assert seen == asked


def test_torchs_call_binds() -> None:
    """Its schema takes what is given, names and places: on tensors without memory, for there is no device here."""
    q, k = (torch.empty(10, heads, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    at = backends.Flash(1.0, TorchCalls()).calls
    lengths = SimpleNamespace(
        queries=torch.zeros(3, dtype=torch.int32, device="meta"), keys=torch.zeros(3, dtype=torch.int32, device="meta"),
        most=(5, 5),
    )  # fmt: skip
    o, lse = at.forward(q, k, k, lengths, (3, 0), 0.5, 0.0)  # type: ignore[arg-type]
    assert o.shape == q.shape and lse.shape == (4, 10)
    dq, dk, dv = at.backward(o, (q, k, k), (o, lse), lengths, (3, 0), 0.5, 0.0)  # type: ignore[arg-type]
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


# ---- FlexAttention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_blocks_allow_what_the_mask_allows(seed: int) -> None:
    draw = random.Random(seed)
    length, causal = draw.randrange(5, 40), draw.random() < 0.7
    window = draw.choice([0, 1, 4, 9]) if causal else 0
    cuts = tuple((0, *sorted(draw.sample(range(1, length), draw.randrange(4))), length) for _ in range(2))
    docs, block = flex.numbers(cuts, 2, length), 4
    part, every = flex.meetings(docs, window, causal, block)
    b, i, j = torch.arange(2)[:, None, None], torch.arange(length)[:, None], torch.arange(length)
    pairs = flex.allowed(docs, window, causal)(b, torch.tensor(0), i, j)
    distance = i - j
    asked = (docs[:, :, None] == docs[:, None]) & ((distance >= 0) | (not causal))
    assert torch.equal(pairs, asked & (distance < window if window else torch.tensor(True)))
    wide = [m.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :length, :length] for m in (part, every)]
    assert torch.equal((wide[0] & pairs) | wide[1], pairs)
    assert not (part & every).any()
    needless = ~(wide[0] & pairs).unfold(1, block, block).unfold(2, block, block).flatten(3).any(3)
    full = length // block
    assert not (needless & part[:, :full, :full]).any()  # no block is visited in vain


class _Largest(TorchDispatchMode):
    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.most = max(self.most, t.numel())
        return out


def test_no_mask_of_all_pairs_exists() -> None:
    length = 1 << 16
    with _Largest() as seen:
        mask = flex.block_mask(((0, 1000, 40_001, length),), 1, length, 0, True, torch.device("cpu"))
    assert seen.most <= (length // flex.BLOCK + 1) ** 2
    assert mask.kv_indices.numel() == (length // flex.BLOCK) ** 2


@pytest.mark.parametrize("cuts", [None, DOCUMENTS])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 0.7, "scale": 0.3}, {"causal": False}], ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_forward(cuts: Cuts | None, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward is not to be had on a CPU, in any form: that is a test of the gpu tier."""
    monkeypatch.setattr(devices, "has_flex", lambda device: True)
    q, k, v = (numbers(B, heads, S, N).detach() for heads in (H, K, K))
    ids = torch.arange(B)
    for sinks in (None, numbers(H).detach()):
        flexible = Causal(Dropout(0.0, "d"), **options)
        with monkeypatch.context() as patch:
            patch.setattr(backends, "_flash", lambda want: None)
            flexible.backend = "fused"
            found = flexible.over(q, k, v, cuts, ids, sinks)
        want = Causal(Dropout(0.0, "d"), **options).over(q, k, v, cuts, ids, sinks)
        assert torch.allclose(found, want, rtol=1e-6, atol=1e-7)


# ---- the choice ----------------------------------------------------------------------------------------------------

GPU = torch.device("cuda")
NARROW, WIDE = torch.bfloat16, torch.float32
CHOICES = {  # (back end, type, softcap, drops, package, flex): kernel, or a word of the refusal
    ("auto", NARROW, 0.0, False, False, True): "torch's flash kernel on cuda",
    ("auto", NARROW, 0.0, False, True, True): "the flash-attn package on cuda",
    ("auto", NARROW, 30.0, False, True, True): "the flash-attn package on cuda",
    ("auto", NARROW, 30.0, False, False, True): "explicit probabilities",
    ("auto", WIDE, 0.0, False, True, True): "explicit probabilities",
    ("auto", NARROW, 0.0, True, True, True): "explicit probabilities",
    ("flash", NARROW, 0.0, False, True, False): "the flash-attn package on cuda",
    ("flash", NARROW, 30.0, False, False, True): "no bound on scores",
    ("flash", WIDE, 0.0, False, True, True): "torch.float32",
    ("flash", NARROW, 0.0, True, True, True): "by place",
    ("fused", WIDE, 0.0, False, False, True): "FlexAttention",
    ("fused", NARROW, 30.0, False, False, True): "FlexAttention",
    ("fused", NARROW, 30.0, False, False, False): "no bound on scores",
    ("fused", NARROW, 0.0, False, False, True): "torch's flash kernel on cuda",
    ("unfused", NARROW, 0.0, False, True, True): "explicit probabilities",
}


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_choice(choice: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, dtype, softcap, drops, package, has_flex = choice
    monkeypatch.setattr(devices, "capabilities", lambda device: devices.HOPPER)
    monkeypatch.setattr(devices, "flash_package", lambda device: Library() if package else None)
    monkeypatch.setattr(devices, "has_flex", lambda device: has_flex)
    want = Wanted(backend, dtype, GPU, 64, 0.125, softcap, drops)
    try:
        found = backends.described(want)
    except Refused as refused:
        found = str(refused)
        assert "--attention-backend" in found
    assert CHOICES[choice] in found


def test_a_kernel_of_whole_rows_is_refused_where_keys_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_flash", lambda want: None)
    monkeypatch.setattr(devices, "has_flex", lambda device: True)
    core = Causal(Dropout(0.0, "d"), softcap=3.0)
    core.backend = "fused"
    with pytest.raises(Refused, match="takes whole rows"):
        core.kernel(numbers(B, H, S, N), torch.arange(B))


def test_an_old_flash_package_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: object())
    for release, found in (("2.6.3", None), ("2.7.0.post2", "calls"), ("3.0.0", "calls")):
        monkeypatch.setattr(devices, "version", lambda name, release=release: release)
        monkeypatch.setattr(devices, "import_module", lambda name: "calls")
        devices._flash_module.cache_clear()
        assert devices._flash_module() == found
    devices._flash_module.cache_clear()
    assert devices.flash_package(torch.device("cpu")) is None and not devices.has_flex(torch.device("cpu"))
