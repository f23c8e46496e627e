"""Generation in one process: the cache against full recompute, rows against single prompts, stops, limits, refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from isotron.core.batch import Batch
from isotron.core.errors import Refused
from isotron.core.nn.attention import Causal
from isotron.core.parallel.plan import Layout
from isotron.inference.checks import check_model
from isotron.inference.config import EngineConfig, inference_layout
from isotron.inference.engine import Engine
from isotron.inference.runner import Runner
from isotron.tokenizers.null import NullTokenizer
from tests.generation import MODELS, PROMPTS, broken, full_logits, make_engine, make_model


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("name", MODELS)
def test_cache_equals_full_recompute(name, dtype, tolerance, monkeypatch):
    engine = make_engine(name, dtype, config=EngineConfig(page=4, chunk=5))
    seen, run = [], Runner.run

    def record(self, spans, wanted):
        logits = run(self, spans, wanted)
        rows = [list(s.tokens[: s.end - i]) for s, n in zip(spans, wanted, strict=True) for i in reversed(range(n))]
        seen.extend(zip(logits, rows, strict=True))
        return logits

    monkeypatch.setattr(Runner, "run", record)
    out = engine.generate(PROMPTS, 14)
    assert len(seen) >= sum(map(len, out.tokens)) > 20 and engine.guessed > engine.accepted > 0
    for logits, row in seen:
        full = full_logits(engine.model, row)
        assert (logits - full).abs().max() <= tolerance * full.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_the_argmax_of_full_recompute(name):
    engine = make_engine(name)
    out = engine.generate(PROMPTS, 10, stop_ids=())
    for prompt, new, logprobs in zip(PROMPTS, out.tokens, out.logprobs, strict=True):
        row = list(prompt)
        for token, logprob in zip(new, logprobs, strict=True):
            full = full_logits(engine.model, row)
            assert token == int(full.argmax())
            assert logprob == pytest.approx(float(torch.log_softmax(full, 0)[token]), abs=1e-10)
            row.append(token)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 2.0, "top_k": 30, "top_p": 0.8}]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_a_batch_is_what_it_is_alone(name, options):
    engine = make_engine(name)
    together = engine.generate(PROMPTS, 12, **options)
    for i, prompt in enumerate(PROMPTS):
        alone = engine.generate([prompt], 12, first_request=i, **options)
        assert alone.tokens == [together.tokens[i]] and alone.reasons == [together.reasons[i]]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[i], abs=1e-10)


def test_neighbours_and_earlier_requests_leave_no_trace():
    engine = make_engine("llama")
    first = engine.generate([PROMPTS[1]], 8)
    engine.generate([[100] * 20, [101] * 15], 10, temperature=1.0)
    with_others = engine.generate([PROMPTS[1], [99] * 20], 8)
    assert engine.generate([PROMPTS[1]], 8) == first
    assert with_others.tokens[0] == first.tokens[0]


def test_stops_per_row_and_ends_early():
    engine = make_engine("gpt")
    free = engine.generate(PROMPTS, 12, stop_ids=())
    assert free.reasons == ["length"] * 4 and [len(t) for t in free.tokens] == [12] * 4
    stop = free.tokens[0][3]
    out = engine.generate(PROMPTS, 12, stop_ids=(stop,))
    for cut, whole, reason in zip(out.tokens, free.tokens, out.reasons, strict=True):
        n = whole.index(stop) + 1 if stop in whole else 12
        assert cut == whole[:n] and reason == ("stop" if stop in whole else "length")
    before = engine.runner.passes
    engine.generate([PROMPTS[0]], 12, stop_ids=(stop,))
    assert engine.runner.passes - before == len(out.tokens[0]) <= 4


def test_the_tokenizer_says_where_a_document_ends():
    model = make_model("gpt")
    first = Engine(model).generate([[5]], 1).tokens[0][0]
    tokenizer = SimpleNamespace(eod=first, eos=None)
    assert Engine(model, tokenizer).generate([[5]], 9).reasons == ["stop"]
    assert Engine(model, tokenizer).generate([[5]], 9, stop_ids=()).reasons == ["length"]
    assert Engine(model, tokenizer).generate([[]], 4, stop_ids=()) == Engine(model).generate([[first]], 4)


def test_no_prompts_give_nothing():
    assert make_engine("gpt").generate([], 4).tokens == []


def test_seeds():
    engine = make_engine("llama")
    a, b, c = (engine.generate(PROMPTS, 12, temperature=1.0, seed=s, stop_ids=()).tokens for s in (1, 1, 2))
    assert a == b and a != c
    same = engine.generate([[5]] * 2, 12, temperature=1.0, stop_ids=()).tokens
    assert same[0] != same[1]  # one prompt twice is two requests


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_padding_of_the_vocabulary_is_never_drawn(name):
    model = make_model(name)
    (stage,) = model.stages.values()
    weight = stage.module.head.weight
    assert weight.shape[0] == 256
    with torch.no_grad():
        weight[131:] = weight[:125] * 50  # whatever the hidden state, some of these would be the likeliest
    out = Engine(model).generate([[t] for t in range(64)], 16, temperature=5.0)
    drawn = {t for row in out.tokens for t in row}
    assert max(drawn) < 131 and len(drawn) > 100


def test_training_goes_on_afterwards():
    model = make_model("llama")
    (stage,) = model.stages.values()
    stage.module.train()
    cores = [layer.attention.core for layer in stage.module.layers.values()]
    Engine(model).generate(PROMPTS, 3)
    assert all(part.training for part in stage.module.modules())
    assert [layer.attention.core for layer in stage.module.layers.values()] == cores
    assert all(type(core) is Causal for core in cores)
    row = torch.arange(8)[None]
    batch = Batch(row, row, torch.ones(1, 8), row, torch.zeros(1, dtype=torch.long))
    assert float(model.forward_backward([batch], 1.0)["loss"]) > 0


# ---- refusals ------------------------------------------------------------------------------------------------------


def lines(refusal: pytest.ExceptionInfo[Refused]) -> str:
    return str(refusal.value)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_longer_than_the_model(name):
    engine = make_engine(name)
    assert len(engine.generate([[1] * 20], 12, stop_ids=()).tokens[0]) == 12  # exactly the limit
    with pytest.raises(Refused) as refusal:
        engine.generate([[1], [1] * 20, [1] * 40], 13)
    text = lines(refusal)
    assert len(refusal.value.problems) == 2 and "max_position_embeddings is 32" in text
    assert "--max-new-tokens 12" in text and "a prompt of at most 31 tokens" in text
    assert engine.generate([[1]], 2).tokens  # it lives on


def test_values_out_of_range_are_all_named():
    engine = make_engine("gpt")
    with pytest.raises(Refused) as refusal:
        engine.generate([[1], [131], [-1]], 0, temperature=-1.0, top_k=-2, top_p=1.5)
    text = lines(refusal)
    for part in ("--temperature -1.0", "--top-k -2", "--top-p 1.5", "--max-new-tokens 0", "token 131", "token -1"):
        assert part in text
    with pytest.raises(Refused, match="--temperature nan"):
        engine.generate([[1]], 1, temperature=float("nan"))


def test_an_empty_prompt_needs_a_tokenizer():
    with pytest.raises(Refused, match="prompt 1 without any token"):
        Engine(make_model("gpt")).generate([[1], []], 2)
    assert Engine(make_model("gpt"), NullTokenizer(131)).generate([[]], 2).tokens[0]


def test_logits_that_are_no_numbers():
    with pytest.raises(Refused, match="not finite") as refusal:
        broken({})
    assert refusal.value.exit_code == 1


def test_layouts_of_training_are_refused_and_corrected():
    layout = Layout(tp=2, pp=2, dp=2, vpp=2, sequence_parallel=True, layers_per_stage=(1, 1, 1, 2), recompute="full",
                    cp=2, ep=2)  # fmt: skip
    model = SimpleNamespace(layout=layout, mesh=SimpleNamespace(sizes={"tp": 2, "cp": 2, "dp": 2, "pp": 2}))
    with pytest.raises(Refused) as refusal:
        check_model(model)
    for option in ("--dp 2", "--vpp 2", "--sequence-parallel"):
        assert option in lines(refusal)
    fixed = inference_layout(layout)
    assert (fixed.tp, fixed.pp, fixed.dp, fixed.vpp, fixed.stages) == (2, 2, 1, 1, 2)
    check_model(SimpleNamespace(layout=fixed, mesh=SimpleNamespace(sizes={"tp": 2, "cp": 1, "dp": 1, "pp": 2})))


def test_an_engine_checks_its_model():
    model = make_model("gpt")
    model.layout = Layout(dp=1, pp=2, vpp=2)
    with pytest.raises(Refused, match="--vpp 2"):
        Engine(model)


def test_the_page_runs(capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "inference.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert "['length', 'length']" in capsys.readouterr().out
