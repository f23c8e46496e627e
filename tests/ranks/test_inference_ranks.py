"""Generation on several processes gives the tokens of one process: greedy, sampled, stopped; from a checkpoint too."""

from __future__ import annotations

import json

import pytest

from isotron.config.schema import changed, from_dict
from isotron.core.checkpoint.load import Source
from isotron.core.errors import Refused
from isotron.launch import run_local
from tests.generation import broken, loaded, make_engine, narrow, save_run, several

LAYOUTS = {
    "TP2": {"tp": 2},
    "TP4": {"tp": 4},
    "PP2": {"pp": 2},
    "PP4": {"pp": 4},
    "TP2xPP2": {"tp": 2, "pp": 2},
}
ONE: dict[str, list] = {}


def one_process(name: str) -> list:
    if name not in ONE:
        ONE[name] = several(name, {})
    return ONE[name]


def size(layout: dict[str, int]) -> int:
    return layout.get("tp", 1) * layout.get("pp", 1)


@pytest.mark.parametrize("name", ["gpt", "llama", "llama-tied"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_same_tokens_as_one_process(ranks, layout, name):
    expected = one_process(name)
    for found in ranks(size(layout), several, name, layout):
        for mine, right in zip(found, expected, strict=True):
            assert mine.tokens == right.tokens and mine.reasons == right.reasons
            for a, b in zip(mine.logprobs, right.logprobs, strict=True):
                assert a == pytest.approx(b, abs=1e-9)


@pytest.mark.parametrize("layout", [{"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2}], ids=str)
def test_a_checkpoint_in_another_layout(ranks, layout, tmp_path):
    step = save_run("llama-tied", tmp_path)
    expected = make_engine("llama-tied").generate(
        [[5, 17, 99, 3, 42, 8, 130], [7], [60, 61, 62], [128, 0]], 8, stop_ids=()
    )
    for found in ranks(size(layout), loaded, "llama-tied", str(step), layout):
        assert found == expected.tokens


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_every_rank_refuses_what_the_last_stage_found(ranks, layout):
    with pytest.raises(Refused, match="not finite"):
        ranks(2, broken, layout)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_agree_in_16_bits(ranks, layout):
    first, second = ranks(2, narrow, layout)
    assert first == second and [len(row) for row in first] == [8] * 4


def test_the_command_on_two_processes(tmp_path, capfd):
    step = save_run("gpt", tmp_path)
    saved = from_dict(Source(step).manifest.meta["config"])
    config = changed(saved, load=str(step), tp=1, pp=2, dp=1, sequence_parallel=False)
    options = {"prompts": ("5 17", "7"), "max_new_tokens": 5, "temperature": 0.0, "top_k": 0, "top_p": 0.0}
    options |= {"seed": 1, "ignore_eos": True, "json": True}
    assert run_local("isotron.inference.generate:main", 2, (config, options)) == 0
    report = json.loads(capfd.readouterr().out)
    expected = make_engine("gpt").generate([[5, 17], [7]], 5, stop_ids=())
    assert [r["tokens"] for r in report["results"]] == expected.tokens
