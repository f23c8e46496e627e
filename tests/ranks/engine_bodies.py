"""Any module under an engine, in several ranks, and the same in torch alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import isotron
from isotron.core.engine.engine import data_parallel_group

STEPS, ACCUMULATION = 4, 2


class Net(nn.Module):
    """A tied weight, a scalar, a frozen layer, a buffer, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(6, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(torch.tanh(self.hidden(self.embed(x)))) * self.scale
        return nn.functional.linear(self.norm(h), self.embed.weight)


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype).eval()  # statistics of a batch would depend on its size


def batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 11, (2, rows), generator=generator))  # type: ignore[return-value]


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def config(**changes: Any) -> dict[str, Any]:
    usual = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-6}},
    }
    return {k: v for k, v in {**usual, **changes}.items() if v is not None}


def run(engine: Any, start: int, stop: int) -> list[float]:
    """Steps of 8 rows, dealt to ranks and micro batches; the mean loss of each."""
    group, found = data_parallel_group(), []
    for step in range(start, stop):
        x, y = batch(step)
        parts = list(zip(x.chunk(group.size * ACCUMULATION), y.chunk(group.size * ACCUMULATION), strict=True))
        losses = []
        for a, b in parts[group.index :: group.size]:
            loss = loss_of(engine, a, b)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(sum(losses) / len(losses))
    return found


def state_of(engine: Any) -> dict[str, Tensor]:
    with engine.held.sharded.gathered() as module:
        return {n: t.detach().clone() for n, t in module.state_dict().items()}


def trained(cfg: dict[str, Any], folder: str = "") -> tuple[dict[str, Tensor], float, list[float]]:
    """Weights, norm and rates after the steps; with a folder, a save half way and a fresh engine that goes on."""
    engine, *_ = isotron.initialize(net(), cfg)
    if not folder:
        run(engine, 0, STEPS)
        return state_of(engine), engine.get_global_grad_norm(), engine.get_lr()
    run(engine, 0, STEPS // 2)
    engine.save_checkpoint(folder, client_state={"seen": 16})
    again, *_ = isotron.initialize(net(), cfg)
    path, client = again.load_checkpoint(folder)
    assert client == {"seen": 16} and path and again.global_steps == STEPS // 2
    run(again, STEPS // 2, STEPS)
    return state_of(again), again.get_global_grad_norm(), again.get_lr()


def places(cfg: dict[str, Any]) -> tuple[bool, bool]:
    """Whether all optimizer state is hosted, and whether own weights are."""
    engine, *_ = isotron.initialize(net(), cfg)
    return len(engine.state._hosted) == len(engine.state.views), all(v.hosted for v in engine.held.views())


KEPT = ("hidden.weight", "norm.*", "unused")


def mixed(cfg: dict[str, Any], folder: str = "") -> tuple[dict[str, Tensor], list[float]]:
    """Weights, and losses, of a module in bfloat16 with parts in float32; with a folder, saved and loaded half way."""
    engine, *_ = isotron.initialize(net(torch.float32), cfg, keep_float32=KEPT)
    losses = run(engine, 0, STEPS // 2)
    if folder:
        engine.save_checkpoint(folder)
        engine, *_ = isotron.initialize(net(torch.float32), cfg, keep_float32=KEPT)
        engine.load_checkpoint(folder)
    return (losses + run(engine, STEPS // 2, STEPS), state_of(engine))[::-1]


def generated(zero: int) -> list[int]:
    """Tokens that a small LLaMA of transformers generates inside an engine after a step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=32, **sizes)).double()
    engine, *_ = isotron.initialize(model, config(train_batch_size=4, zero_optimization={"stage": zero}))
    tokens = torch.arange(4 * 12).view(4, 12) % 61
    group = data_parallel_group()
    for part in tokens.chunk(ACCUMULATION * group.size)[group.index :: group.size]:
        engine.backward(engine(input_ids=part, labels=part).loss)
        engine.step()
    engine.module.eval()
    with torch.no_grad():
        found = engine.module.generate(tokens[:1, :4], max_new_tokens=8, do_sample=False, eos_token_id=None)
    return found[0].tolist()


def resumed(cfg: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Go on from a folder that another number of ranks has saved."""
    engine, *_ = isotron.initialize(net(), cfg)
    engine.load_checkpoint(folder)
    run(engine, STEPS // 2, STEPS)
    return state_of(engine)
