"""Families from Hugging Face over several ranks: export, greedy generation as in `transformers`, the float64 matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isotron.core.models.gemma2_config import Gemma2Config
from isotron.core.models.gemma3_config import Gemma3Config
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.mistral_config import MistralConfig
from isotron.core.models.neox_config import NeoXConfig
from isotron.core.models.olmo2_config import Olmo2Config
from isotron.core.models.phi3_config import Phi3Config
from isotron.core.models.qwen2_config import Qwen2Config
from isotron.core.models.qwen3_config import Qwen3Config
from isotron.core.parallel.plan import Layout
from isotron.hub.folder import open_folder
from isotron.train.verify import Case, Measured, compare, measure
from tests.hf_twins import TWINS, save
from tests.hub_bodies import LAYOUTS, PROMPTS, case_of, exported, generated

transformers = pytest.importorskip("transformers")
WORLD = {"TP2": 2, "PP2": 2, "TP2xPP2": 4, "TP4": 4}
ONE_EACH = (
    "llama",
    "llama-biased",
    "llama-tied",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gpt2",
    "neox",
    "gemma2",
    "gemma3",
    "olmo2",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    @cache
    def of(name: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp(name)
        return directory, save(name, directory)

    return of


def some(layouts: tuple[str, ...]) -> list[Any]:
    """Every family over tensors and stages at once, every third over each of the other layouts; the rest are slow."""
    found = []
    for i, name in enumerate(ONE_EACH):
        for j, layout in enumerate(layouts):
            often = layout == "TP2xPP2" or i % 3 == j % 3
            found.append(pytest.param(name, layout, marks=() if often else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "layout"), some(tuple(LAYOUTS)))
def test_through_a_layout_and_back(ranks: Any, saved: Any, tmp_path: Path, name: str, layout: str) -> None:
    source, _ = saved(name)
    names = ranks(WORLD[layout], exported, source, tmp_path / "back", LAYOUTS[layout], timeout=120)
    old, new = (load_file(d / "model.safetensors") for d in (source, tmp_path / "back"))
    assert old.keys() == new.keys() == set(names[0]) and all(n == names[0] for n in names)
    assert all(torch.equal(old[n].view(torch.uint8), new[n].view(torch.uint8)) for n in old)
    assert open_folder(source).model == open_folder(tmp_path / "back").model


def test_a_result_that_cannot_be_written_fails_on_every_rank(ranks: Any, saved: Any, tmp_path: Path) -> None:
    source, _ = saved("llama")
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="(?i)not a directory|file"):
        ranks(2, exported, source, tmp_path / "file" / "back", LAYOUTS["TP2"], timeout=60)


@cache
def expected(twin: Any, count: int) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = twin.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                            eos_token_id=None, pad_token_id=0)  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(("name", "layout"), some(("TP2", "PP2", "TP2xPP2")))
def test_greedy_generation(ranks: Any, saved: Any, name: str, layout: str) -> None:
    source, twin = saved(name)
    count = 40  # past the windows, and past the original positions of llama3
    tokens = ranks(WORLD[layout], generated, source, LAYOUTS[layout], count, timeout=120)
    assert all(t == expected(twin, count) for t in tokens)


@pytest.mark.parametrize("name", TWINS)
def test_greedy_generation_on_one_process(saved: Any, name: str) -> None:
    source, twin = saved(name)
    assert generated(source, {}, 48) == expected(twin, 48)


ROPE = {"rope_theta": 500.0, "rope_original_positions": 12, "rope_factor": 4.0}
MODELS: dict[str, Any] = {
    "llama-llama3": LlamaConfig(5, 32, 4, 2, 16, 48, 131, 64, rope_scaling="llama3", **ROPE),
    "llama-biased": LlamaConfig(3, 32, 8, 2, 12, 48, 131, 64, attention_bias=True, mlp_bias=True),
    "llama-yarn": LlamaConfig(3, 32, 4, 2, 16, 48, 131, 64, rope_scaling="yarn", **ROPE),
    "mistral": MistralConfig(5, 32, 4, 2, 16, 48, 131, 64, sliding_window=7, attention_dropout=0.1),
    "qwen2": Qwen2Config(5, 32, 8, 2, 0, 48, 131, 64, sliding_window=7, first_window_layer=2, tie_embeddings=True),
    "qwen3": Qwen3Config(5, 32, 8, 2, 12, 48, 131, 64, hidden_dropout=0.1),
    "phi3": Phi3Config(3, 32, 4, 2, 16, 48, 131, 64, rope_scaling="longrope", rope_percent=0.5,
                       rope_original_positions=12, rope_short_factor=(1.0,) * 4, rope_long_factor=(1.0, 2.0, 3.0, 4.0)),
    "gemma2": Gemma2Config(5, 32, 8, 2, 12, 48, 131, 64, sliding_window=7, attn_logit_softcapping=2.0,
                           final_logit_softcapping=1.0, tie_embeddings=True, attention_dropout=0.1),
    "gemma3": Gemma3Config(5, 32, 4, 2, 12, 48, 131, 64, sliding_window=7, window_attn_skip_freq=3,
                           query_pre_attn_scalar=20, rope_scaling="linear", **ROPE),
    "olmo2": Olmo2Config(5, 32, 8, 2, 12, 48, 131, 64, hidden_dropout=0.1),
    "neox": NeoXConfig(5, 32, 4, 48, 131, 64, rope_percent=0.5, hidden_dropout=0.1),
    "neox-serial": NeoXConfig(3, 32, 4, 48, 131, 64, parallel_residual=False),
}  # fmt: skip
MATRIX: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "TP2xPP2": {"tp": 2, "pp": 2, "recompute": "selective"},
    "TP4+SP": {"tp": 4, "sequence_parallel": True},
}


@cache
def reference(case: Case) -> Measured:
    alone = replace(case, layout=Layout(dp=1, make_vocab_size_divisible_by=1), micro_batch=1)
    return measure(alone)


def choices() -> list[Any]:
    """Every model with a layout, so that each layout meets a quarter of the models; the rest are slow."""
    found, layouts = [], list(MATRIX)
    for i, name in enumerate(MODELS):
        for j, layout in enumerate(layouts):
            often = (j - i) % len(layouts) == 0
            found.append(pytest.param(name, layout, marks=() if often else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "layout"), choices())
def test_matrix(ranks: Any, name: str, layout: str) -> None:
    case = case_of(MODELS[name], MATRIX[layout])
    found = ranks(case.layout.world, measure, case, timeout=120)[0]
    bad = [row for row in compare(found, reference(replace(case, layout=Layout(dp=1)))) if not row.passes]
    assert not bad, "\n".join(f"{r.what}: {r.difference:.3g} of {r.scale:.3g}" for r in bad[:8])
