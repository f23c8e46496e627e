"""Whole training runs on pooled ranks: small configs, data, what a run wrote, and bodies that run `train.main.run`."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isotron.config.check import finish
from isotron.config.schema import RunConfig, changed
from isotron.core.checkpoint.load import Source
from isotron.core.layout import Box
from isotron.core.models.bert_config import BertConfig
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.t5_config import T5Config
from isotron.data.indexed_writer import IndexedWriter
from isotron.launch import World
from isotron.train.main import run

VOCAB = 131
MODELS = {
    "gpt": GPTConfig(3, 32, 4, vocab_size=VOCAB, hidden_dropout=0.1, attention_dropout=0.1),
    "llama": LlamaConfig(3, 32, 4, 2, ffn_hidden_size=48, vocab_size=VOCAB),
    "bert": BertConfig(3, 32, 4, vocab_size=VOCAB),
    "t5": T5Config(3, 2, 32, 4, 6, 48, VOCAB, relative_attention_num_buckets=8, relative_attention_max_distance=12),
}


def config(model: str, **leaves: Any) -> RunConfig:
    """A finished config of 4 samples of 16 tokens a step; leaves by name, as in `changed`."""
    usual = {
        "tokenizer_type": "NullTokenizer",
        "seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 20, "lr": 1e-2, "eval_iters": 0,
        "make_vocab_size_divisible_by": 8, "tensorboard": False, "log_interval": 100, "check_interval": 5,
        "device": "cpu", "dp": 1, "ddp_bucket_size": 3000, "mock_data": "data_path" not in leaves,
    }  # fmt: skip
    return finish(changed(RunConfig(model=MODELS[model]), **{**usual, **leaves}))


def write_data(directory: Path, documents: int = 30) -> str:
    """30 documents: about 60 samples of 16 tokens, so that 10 steps of 4 end in the first epoch, 20 in the second."""
    prefix = str(directory / "words")
    random = np.random.default_rng(5)
    with IndexedWriter(prefix, VOCAB) as writer:
        for length in random.integers(10, 60, documents):
            writer.add_document(random.integers(0, VOCAB, length))
    return prefix


def here() -> World:
    """This rank's world as the pool made it."""
    return World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())


def train(cfg: RunConfig, run_dir: str) -> int:
    """A run on this rank; the exit code."""
    return run(cfg, run_dir, here())


def train_heard(cfg: RunConfig, run_dir: str) -> tuple[int, str]:
    """A run on this rank: the exit code, and what it wrote to standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as heard:
        code = train(cfg, run_dir)
    return code, heard.getvalue()


def train_each(jobs: list[tuple[RunConfig, str]]) -> list[int]:
    """Several runs, one after the other, in one process."""
    return [train(cfg, run_dir) for cfg, run_dir in jobs]


def tensors(step_dir: str | Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole: weights, masters and moments."""
    source = Source(step_dir)
    found = {}
    for name in source.names():
        dtype, shape = source.info(name)
        found[name] = torch.empty(shape, dtype=dtype)
        source.read(name, Box((0,) * len(shape), shape), found[name])
    source.close()
    return found


def step_dir(run_dir: str | Path, step: int) -> str:
    """The checkpoint of a step."""
    return os.path.join(run_dir, f"step_{step:08d}")


def lines(run_dir: str | Path, key: str = "loss") -> dict[int, Any]:
    """step -> a value of `metrics.jsonl`."""
    text = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8")
    return {line["step"]: line[key] for line in map(json.loads, text.splitlines()) if key in line}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], names: Any = None) -> None:
    """Bitwise equality of two checkpoints, or of some of their names."""
    assert sorted(a) == sorted(b) or names is not None
    chosen = list(a if names is None else names)
    assert chosen
    different = [n for n in chosen if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]
    assert not different, different


def goes_on(
    ranks: Callable[..., list[Any]], place: Path, family: str, settings: dict[str, Any], layouts: dict[str, Any]
) -> None:
    """Four steps of one process against two of it and two in each layout: dropout, blends, validation, checkpoint."""
    words, whole = write_data(place), str(place / "whole")
    cfg = config(family, data_path=("0.7", words, "0.3", words), save=whole, save_interval=2, **settings)
    assert ranks(1, train, cfg, whole) == [0]
    wanted = {key: lines(whole, key) for key in ("loss", "grad_norm", "sample_ids", "eval_loss")}
    assert set(wanted["loss"]) == {1, 2, 3, 4} and set(wanted["eval_loss"]) == {2, 4}
    for name, layout in layouts.items():
        rest = str(place / name.replace(" ", "-"))
        other = changed(cfg, load=step_dir(whole, 2), save=rest, layer_split="balanced", **layout)
        assert ranks(other.layout.world, train, other, rest) == [0] * other.layout.world
        for key, first in wanted.items():
            later = lines(rest, key)
            assert later == {step: pytest.approx(first[step], rel=1e-9) for step in first if step > 2}, (name, key)
        found, own = tensors(step_dir(rest, 4)), tensors(step_dir(whole, 4))
        assert found.keys() == own.keys()
        assert all((found[n] - own[n]).abs().max() <= 1e-9 * own[n].abs().max() + 1e-15 for n in own), name
