"""What a step keeps: saved bytes by recompute mode, no logits of the whole batch, nothing after the step."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.nn import logits
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from tests.live import Live

B, S, D, V = 2, 64, 32, 1000
MODELS = {
    "llama": LlamaConfig(4, D, 4, 2, 0, 96, V, S),
    "gpt": GPTConfig(4, D, 4, 0, V, S),  # with dropout, and so explicit attention probabilities
}


def build(model: str, recompute: str = "none", dtype: torch.dtype = torch.float32) -> ParallelModel:
    layout = Layout(dp=1, recompute=recompute, make_vocab_size_divisible_by=1)
    return ParallelModel(MODELS[model], layout, Mesh(), dtype, torch.device("cpu"), 1)


def batches(count: int = 1) -> list[Batch]:
    rows = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(3))
    one = Batch(rows[:, :-1], rows[:, 1:], torch.ones(B, S), torch.arange(S).expand(B, -1), torch.arange(B))
    return [one] * count


def saved_bytes(model: ParallelModel) -> int:
    """Bytes that one forward keeps for its backward, parameters aside, each storage once."""
    own = {p.untyped_storage().data_ptr() for stage in model.stages.values() for p in stage.module.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    (batch,), stage = batches(), model.stages[0]
    stage.module.train()
    stage.flat.begin()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, terms = stage.module(batch, {}, 1.0)
        terms["loss"][0].backward()
    return sum(kept.values())


@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_more_recompute_keeps_less(model: str) -> None:
    full, selective, none = (saved_bytes(build(model, how)) for how in ("full", "selective", "none"))
    assert full < 0.6 * selective and selective < 0.8 * none


def live_in(model: ParallelModel) -> Live:
    """What a step makes, the model's own buffers aside."""
    return Live([x for stage in model.stages.values() for x in (stage.flat.weights, stage.flat.grads)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_logits_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(logits, "CHUNK_BYTES", 16 * 4 * V)
    monkeypatch.setattr(logits, "BLOCK_BYTES", 16 * 4 * V)
    model = build("llama", dtype=dtype)
    with live_in(model) as live:
        model.forward_backward(batches(), 1.0)
    whole = B * S * V * model.stages[0].flat.weights.element_size()
    assert 0 < live.largest < whole / 2


@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_nothing_is_left_after_a_step(model: str, recompute: str) -> None:
    made = build(model, recompute)
    made.forward_backward(batches(), 1.0)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    before = tensors()
    for _ in range(3):
        made.forward_backward(batches(2), 1.0)
    assert tensors() == before


def test_microbatches_do_not_pile_up() -> None:
    model = build("llama")
    peaks = []
    for count in (1, 4):
        with live_in(model) as live:
            model.forward_backward(batches(count), 1.0)
        peaks.append(live.peak)
    assert peaks[1] < 1.1 * peaks[0]
