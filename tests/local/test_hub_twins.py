"""Every family from a directory that `transformers` wrote: logits and every gradient at 200 positions, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isotron.core.batch import Batch
from isotron.core.layout import whole
from isotron.core.parallel.plan import Layout
from isotron.hub.live import from_hf
from isotron.hub.reader import HFSource
from tests.hf_twins import TWINS, S, V, save

pytest.importorskip("transformers")


def batch() -> Batch:
    rows = torch.randint(0, V, (2, S + 1), generator=torch.Generator().manual_seed(3))
    mask = torch.rand(2, S, generator=torch.Generator().manual_seed(4)).gt(0.3).float()
    return Batch(rows[:, :-1], rows[:, 1:], mask, torch.arange(S).expand(2, -1), torch.arange(2))


def close(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape, what
    assert (a - b).abs().max() <= 1e-5 * b.abs().max(), f"{what}: {(a - b).abs().max()} of {b.abs().max()}"


@pytest.mark.parametrize("name", TWINS)
def test_logits_and_gradients(name: str, tmp_path: Path) -> None:
    twin, data = save(name, tmp_path), batch()
    model = from_hf(tmp_path, Layout(dp=1, make_vocab_size_divisible_by=64))
    (stage,) = model.stages.values()
    theirs = twin(data.tokens, position_ids=data.positions).logits
    losses = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), data.labels.flatten(), reduction="none")
    weight = 1 / float(data.loss_mask.sum())
    (losses * data.loss_mask.flatten()).sum().mul(weight).backward()
    _, ours = stage.module.eval().logits(data, {})
    close("logits", ours, theirs.detach())
    model.forward_backward([data], weight)
    wanted = gradients(twin, tmp_path / "gradients")
    assert set(stage.flat.sinks) == {n for n in wanted.names() if n not in stage.buffers}
    for ours, sink in stage.flat.sinks.items():
        dtype, shape = wanted.info(ours)
        theirs = torch.full(shape, torch.nan, dtype=dtype)
        wanted.read(ours, whole(shape), theirs)
        close(ours, sink.buffer[: len(theirs)], theirs)


def gradients(twin: Any, directory: Path) -> HFSource:
    """The twin's gradients under our names: saved in place of its weights, as its library writes them."""
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(p.grad)
    twin.save_pretrained(directory)
    return HFSource(directory, check_head=False)
