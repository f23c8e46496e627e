"""Every file in configs/ loads and passes every rule, in the world that it is meant for."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotron.config.check import broken, finish
from isotron.config.load import load
from isotron.config.rules import Facts
from isotron.config.schema import RunConfig
from isotron.core.parallel.plan import split_layers

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

# file -> (processes of the launcher, GPUs of a machine, what dp comes to)
WORLDS = {
    "demo.toml": (None, 0, 1),
    "tiny.toml": (None, 0, 1),
    "llama3-8b.toml": (64, 8, 16),
    "gpt-175b.toml": (1024, 8, 8),
    "mixtral-8x7b.toml": (128, 8, 4),
    "llama3-70b.toml": (512, 8, 16),
    "llama3-405b.toml": (8192, 8, 64),
    "deepseek-v3.toml": (2048, 8, 128),
    "gpt-8.3b.toml": (64, 8, 8),
    "gpt-530b.toml": (2240, 8, 8),
    "gpt-1t.toml": (3072, 8, 6),
}


def finished(name: str) -> tuple[RunConfig, Facts]:
    world, devices, _ = WORLDS[name]
    # paths of data and tokenizers are those of the user's machine
    facts = Facts(world, devices, 4096 if name == "demo.toml" else 0, exists=lambda path: True)
    config, _, _ = load(["--config", str(CONFIGS / name)])
    return finish(config, world, devices, facts.tokenizer_vocab), facts


def test_every_config_is_tested() -> None:
    assert {p.name for p in CONFIGS.glob("*.toml")} == set(WORLDS)


@pytest.mark.parametrize("name", WORLDS)
def test_a_config_passes_every_rule(name: str) -> None:
    config, facts = finished(name)
    assert [str(problem) for problem in broken(config, facts)] == []
    assert config.layout.dp == WORLDS[name][2]


def test_what_the_comments_say() -> None:
    llama, _ = finished("llama3-8b.toml")
    assert llama.train.global_batch_size * llama.data.seq_length == pytest.approx(4.2e6, rel=0.01)
    assert llama.train.train_iters * 4.2e6 == pytest.approx(420e9, rel=0.01)
    gpt, _ = finished("gpt-175b.toml")
    assert {len(r) for r in split_layers(gpt.model.num_layers, gpt.layout)} == {2}
    tokens = gpt.train.global_batch_size * gpt.data.seq_length
    assert gpt.train.global_batch_size // gpt.layout.dp == 192
    assert gpt.train.train_iters * tokens == pytest.approx(300e9, rel=0.01)
    assert gpt.schedule.lr_decay_iters * tokens == pytest.approx(260e9, rel=0.01)
    assert gpt.schedule.lr_warmup_iters * tokens == pytest.approx(375e6, rel=0.01)
