"""Generation on several processes gives the tokens of one process: greedy, sampled, stopped; from a checkpoint too."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from isotron.config.schema import changed, from_dict
from isotron.core.checkpoint.load import Source
from isotron.core.errors import Refused
from isotron.launch import run_local
from tests import hf_twins
from tests.generation import broken, guessed, loaded, long_prompts, make_engine, narrow, save_run, several, twins_agree
from tests.serving import call

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


# every layout with one model or two, every model with two layouts or three
SAME = [
    pytest.param(layout, model, marks=() if (i + j) % 2 else pytest.mark.slow, id=f"{name}-{model}")
    for i, (name, layout) in enumerate(LAYOUTS.items())
    for j, model in enumerate(("gpt", "llama", "llama-tied"))
]


@pytest.mark.parametrize(("layout", "name"), SAME)
def test_same_tokens_as_one_process(ranks, layout, name):
    expected = one_process(name)
    for found in ranks(size(layout), several, name, layout):
        for mine, right in zip(found, expected, strict=True):
            assert mine.tokens == right.tokens and mine.reasons == right.reasons
            for a, b in zip(mine.logprobs, right.logprobs, strict=True):
                assert a == pytest.approx(b, abs=1e-9)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2, "pp": 2}], ids=str)
def test_guesses_of_the_models_own_modules(ranks, layout):
    plain = guessed({}, "none")
    for greedy, drawn, count in ranks(2 * layout.get("pp", 1), guessed, layout):
        assert (greedy, drawn) == plain[:2] and count > 20


LONG = [("gemma2", {"cp": 2, "tp": 2}), ("deepseek_v3", {"cp": 2, "pp": 2}), ("mixtral", {"cp": 2, "ep": 2}),
        ("mixtral", {"cp": 2, "tp": 2, "ep": 2})]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), LONG, ids=str)
def test_long_prompts_over_ranks(ranks, name, layout, tmp_path):
    hf_twins.save(name, tmp_path, torch.float64)
    right, passes = long_prompts(str(tmp_path), {})
    for found, more in ranks(2 * layout.get("tp", 1) * layout.get("pp", 1), long_prompts, str(tmp_path), layout):
        assert more >= passes + 2  # parts of prompts are passes of their own
        assert [new for new, _ in found] == [new for new, _ in right]
        for (_, mine), (_, alone) in zip(found, right, strict=True):
            assert mine == pytest.approx(alone, abs=1e-9)


@pytest.mark.parametrize(
    "layout", [{"tp": 4}, {"tp": 2, "pp": 2}, pytest.param({"pp": 4}, marks=pytest.mark.slow)], ids=str
)
def test_a_checkpoint_in_another_layout(ranks, layout, tmp_path):
    step = save_run("llama-tied", tmp_path)
    expected = make_engine("llama-tied").generate(
        [[5, 17, 99, 3, 42, 8, 130], [7], [60, 61, 62], [128, 0]], 8, stop_ids=()
    )
    for found in ranks(size(layout), loaded, "llama-tied", str(step), layout):
        assert found == expected.tokens


MIXED = [[(7 * i * i + j) % 131 for i in range(1, n)] for j, n in enumerate((40, 3, 21))]


EP2 = {"tp": 2, "ep": 2, "etp": 1}
TWINS = [(name, cut) for name in ("gpt2", "llama", "qwen2-window", "mixtral") for cut in ({}, {"tp": 2}, {"pp": 2})]


@pytest.mark.parametrize(("name", "layout"), [*TWINS, ("mixtral", EP2)], ids=str)
def test_tokens_and_logprobs_of_transformers(ranks, name, layout, tmp_path):
    theirs = hf_twins.save(name, tmp_path)
    alone = twins_agree(str(tmp_path), MIXED, {})
    found = ranks(size(layout), twins_agree, str(tmp_path), MIXED, layout) if layout else [alone]
    for greedy, drawn, beams, logprobs in found:
        assert [greedy, drawn, beams] == alone[:3]
        for prompt, new, mine in zip(MIXED, greedy, logprobs, strict=True):
            logits = theirs(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
            assert new == logits.argmax(-1).tolist()
            right = torch.log_softmax(logits.detach().double(), -1)
            assert mine == pytest.approx([float(right[i, t]) for i, t in enumerate(new)], abs=1e-5)


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


@pytest.mark.slow
def test_the_command_with_experts_on_two_processes(tmp_path, capfd):
    from isotron import cli

    hf_twins.save("mixtral", tmp_path)
    expected = twins_agree(str(tmp_path), [[5, 17]], {})[0]
    words = ["--load", str(tmp_path), "--prompt", "5 17", "--max-new-tokens", "8", "--temperature", "0", "--json"]
    assert cli.main(["generate", *words, "--tp", "2", "--ep", "2", "--etp", "1", "--device", "cpu"]) == 0
    (result,) = json.loads(capfd.readouterr().out)["results"]
    assert result["tokens"] == expected[0]
    words[3] = " ".join(map(str, range(40)))
    assert cli.main(["generate", *words, "--cp", "2", "--ep", "2", "--device", "cpu"]) == 0
    (result,) = json.loads(capfd.readouterr().out)["results"]
    assert result["tokens"] == twins_agree(str(tmp_path), [list(range(40))], {})[0][0]


@pytest.mark.parametrize("cut", ["--pp", pytest.param("--tp", marks=pytest.mark.slow)])
def test_a_server_on_two_processes(cut, tmp_path):
    step = save_run("gpt", tmp_path)
    words = ["serve", "--load", str(step), cut, "2", "--port", "0", "--dtype", "float32", "--chunk", "4", "--json"]
    process = subprocess.Popen([sys.executable, "-m", "isotron", *words], stdout=subprocess.PIPE, text=True)
    try:
        said = json.loads(process.stdout.readline())
        address = ("127.0.0.1", int(said["url"].rsplit(":", 1)[1]))
        expected = make_engine("gpt", "float32").generate([[5, 17], [7]], 5)
        body = {"prompt": ["5 17", "7"], "max_tokens": 5, "temperature": 0}
        status, reply = call(address, "POST", "/v1/completions", body)
        assert status == 200 and reply["usage"]["completion_tokens"] == sum(map(len, expected.tokens))
        tokens = [list(map(int, c["text"].split())) for c in reply["choices"]]
        assert tokens == [[t for t in row if t != 130] for row in expected.tokens]
        assert call(address, "POST", "/v1/completions", {**body, "max_tokens": 99})[0] == 400
        process.terminate()
        assert process.wait(30) in (0, 143)
    finally:
        process.kill()
        process.wait()
