"""The engine's choices against transformers, and what makes it fast against what it must not change."""

from __future__ import annotations

import json
import re

import pytest
import torch

from isotron.core.batch import Batch
from isotron.core.device import has_packed_products
from isotron.core.errors import Refused
from isotron.inference.beam import search
from isotron.inference.config import Beams, Ending, EngineConfig, Sampling, Wish
from isotron.inference.engine import Engine
from isotron.inference.packed import TRIES, Product, worthwhile
from isotron.inference.pages import Pages
from isotron.inference.row import Luck
from isotron.inference.speculate import FEW
from isotron.inference.text import Text
from isotron.tokenizers.null import NullTokenizer
from tests.generation import PROMPTS, make_engine, make_model, twin_engine

CONFIG = EngineConfig(page=8, chunk=16)


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "eos_token_id": None}


LONG = [[(7 * i * i + j) % 131 for i in range(1, n)] for j, n in enumerate((40, 3, 70, 21))]


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2-window", "qwen3", "mistral", "neox", "phi3", "mixtral"])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(name, tmp_path):
    theirs, engine = twin_engine(name, tmp_path, CONFIG)
    rows = [r for r in engine.answer(LONG, Wish(ending=Ending(12), tops=3))]
    for prompt, (row,) in zip(LONG, rows, strict=True):
        alone = theirs.generate(
            **padded([prompt]), max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        assert row.new == alone.sequences[0, len(prompt) :].tolist()
        own = torch.log_softmax(torch.cat(alone.logits).double(), -1)
        assert row.logprobs == pytest.approx([float(own[i, t]) for i, t in enumerate(row.new)], abs=1e-5)
        for place, tops in enumerate(row.tops):
            assert [t for t, _ in tops] == own[place].topk(3).indices.tolist()
            assert [p for _, p in tops] == pytest.approx(own[place].topk(3).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"length_penalty": 2.0}, {"early_stopping": True}], ids=str)
def test_beams_are_those_of_transformers(options, tmp_path):
    theirs, engine = twin_engine("llama", tmp_path, EngineConfig(page=4, chunk=16), torch.float64)
    end = engine.generate([LONG[1]], 6).tokens[0][3]
    for prompt in LONG[1:]:
        arguments = {**padded([prompt]), "eos_token_id": end, "num_beams": 4, "num_return_sequences": 2, **options}
        wanted = theirs.generate(**arguments, max_new_tokens=10, do_sample=False)[:, len(prompt) :].tolist()
        (found,) = search(engine, [prompt], Wish(ending=Ending(10, frozenset({end})), n=2), Beams(4, **options))
        for row, right in zip(found, wanted, strict=True):
            assert row.new == right[: len(row.new)] and set(right[len(row.new) :]) <= {0, end}


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7, seed=4), Sampling(1.0, 20, 0.9, 5, frequency_penalty=0.5)]
)
@pytest.mark.parametrize("kind", ["auto", "ngram", "draft"])
def test_guesses_change_no_token(kind, sampling):
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [7, 7, 7], [9]]
    wish = Wish(sampling, Ending(20))
    plain = make_engine("llama", config=EngineConfig(page=4, speculate="none")).answer(prompts, wish)
    draft = make_model("llama") if kind == "draft" else None
    engine = Engine(make_model("llama"), NullTokenizer(131), EngineConfig(page=4, speculate=kind), draft)
    guessed = engine.answer(prompts, wish)
    assert [[r.new for r in rows] for rows in guessed] == [[r.new for r in rows] for rows in plain]
    if kind == "draft":  # the model itself as draft: every guess is right, also when it is drawn
        assert engine.accepted == engine.guessed > 30 and engine.runner.passes < 25
    else:
        assert engine.guessed > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=4)])
def test_the_models_own_modules_guess(sampling):
    """Tokens as without; the first guesses of every step are what the modules choose in the training forward."""
    prompts, wish = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 11, 12], [7, 7, 7], [9]], Wish(sampling, Ending(20))
    plain = make_engine("mtp").answer(prompts, wish)
    engine = make_engine("mtp", config=EngineConfig(page=4, chunk=5, speculate="mtp", lookahead=3))
    made: dict[tuple[int, ...], list[int]] = {}
    with engine.opened(400):
        rows = [engine.add(p, wish, i)[0] for i, p in enumerate(prompts)]
        while not engine.idle:
            before = [list(row.tokens) for row in rows]
            guess = engine.guesser.guess

            def watched(found, most, guess=guess):
                guess(found, most)
                made.update({tuple(r.tokens): list(r.guesses) for r in found if r.guesses})

            engine.guesser.guess = watched
            engine.step()
            engine.guesser.guess = guess
            assert all(row.tokens[: len(old)] == old for row, old in zip(rows, before, strict=True))
    assert [r.new for r in rows] == [answers[0].new for answers in plain]
    assert engine.guessed > 20 and len(made) > 10 and sum(len(guesses) == 3 for guesses in made.values()) > 8
    if sampling.temperature == 0:
        assert all(further(list(row), guesses) == guesses[:2] for row, guesses in made.items())


def further(row: list[int], guesses: list[int]) -> list[int]:
    """The tokens after the next by the training modules, each given the guess before: from the output at the last
    place but one."""
    model, found = make_model("mtp"), []
    (stage,) = model.stages.values()
    module, tokens = stage.module.eval(), torch.tensor([row + guesses])
    seen = tokens[:, : len(row) - 1]
    batch = Batch(seen, seen, torch.ones(seen.shape), torch.arange(len(row) - 1)[None], torch.zeros(1).long())
    with torch.no_grad():
        x = module.norm(module.hidden(batch, {}))
        for k, depth in enumerate(list(module.mtp)[: len(guesses)], 1):
            ids = tokens[:, k : k + len(row) - 1]
            x = depth(module.mtp_embed(ids), x, module._context(batch, x.dtype))
            found.append(int(module.head.logits(x)[0, -1, :131].argmax()))
    return found


def test_guesses_are_tried_as_long_as_they_pay():
    luck, seen = Luck(), []
    for right in (2, 7, 3, 0):
        luck.saw(luck.bold, right)
        seen.append((luck.bold, luck.rest, luck.patience))
    assert seen == [(7, 0, 4), (7, 0, 4), (2, 0, 4), (2, 4, 8)]
    for left in (3, 2, 1, 0, 0):
        luck.saw(0, 0)
        assert luck.rest == left
    luck.saw(2, 0)
    assert luck.rest == 8 and luck.patience == 16


def test_a_pass_of_many_rows_has_no_guesses():
    prompts, wish = [[1, 2, 1, 2, 1, 2]] * (FEW + 1), Wish(Sampling(), Ending(4))
    engine = make_engine("llama", config=EngineConfig(2 * FEW, page=4))
    engine.answer(prompts, wish)
    assert engine.guessed == 0
    engine.answer(prompts[:FEW], wish)
    assert engine.guessed >= FEW


def test_a_product_uses_a_copy_of_its_matrix_once_that_pays():
    weight, bias = torch.randn(96, 33), torch.randn(96)
    multiply = Product(weight, packed=True)
    for rows in (0, 1, 3, 4, 4, 4, 4, 1, 5, 70):
        x = torch.randn(rows, 1, 33)
        torch.testing.assert_close(multiply(x, bias), torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    able = has_packed_products(weight.device, weight.dtype)
    assert (multiply.copy is not None) == able
    for other in (Product(weight, packed=False), Product(weight.double(), packed=True)):
        for _ in range(TRIES + 1):
            other(torch.randn(8, 33, dtype=other.weight.dtype))
        assert other.copy is None


def test_copies_of_weights_need_room(monkeypatch):
    monkeypatch.setattr("isotron.inference.packed.available_memory", lambda: 1000.0)
    assert worthwhile([torch.zeros(125)]) and not worthwhile([torch.zeros(100), torch.zeros(26)])


def test_an_engine_that_is_opened_again_has_the_weights_of_then():
    model, wish = make_model("llama", "float32"), Wish(Sampling(), Ending(8))
    engine, prompts = Engine(model, NullTokenizer(131), EngineConfig(page=4)), [[1, 2, 3], [5], [7, 8], [9], [11]]
    first = [rows[0].new for rows in engine.answer(prompts, wish)]
    (stage,) = model.stages.values()
    with torch.no_grad():
        for p in stage.module.parameters():
            p.data.mul_(-1.5)
    again = [rows[0].new for rows in engine.answer(prompts, wish)]
    fresh = [rows[0].new for rows in Engine(model, NullTokenizer(131)).answer(prompts, wish)]
    assert again == fresh != first


def test_a_wrong_guess_is_replaced():
    engine = make_engine("gpt", config=EngineConfig(page=4, speculate="ngram"))
    plain = make_engine("gpt").generate(PROMPTS, 20)
    assert engine.generate(PROMPTS, 20).tokens == plain.tokens and engine.accepted < engine.guessed


def test_a_beginning_is_computed_once():
    engine = make_engine("llama")
    wish = Wish(Sampling(1.0), Ending(3), n=4)
    with engine.opened(200):
        pages = engine.at_work.pages
        first = engine.add(list(range(18)), wish)
        while not engine.idle:
            engine.step()
        assert pages.hits == 3 * 16 and pages.used == 0 and pages.remembered
        again = engine.add(list(range(18)), wish)
        while not engine.idle:
            engine.step()
        assert pages.hits == 7 * 16 and [r.new for r in again] == [r.new for r in first]
    fresh = make_engine("llama", config=EngineConfig(page=4, reuse=False)).answer([list(range(18))], wish)
    assert [r.new for r in fresh[0]] == [r.new for r in first]
    assert len({tuple(r.new) for r in first}) > 1


def test_requests_come_go_and_wait():
    engine = make_engine("llama", config=EngineConfig(rows=2, page=4, chunk=6))
    alone = [make_engine("llama").generate([p], 6, first_request=i).tokens[0] for i, p in enumerate(PROMPTS)]
    with engine.opened(64):
        rows = [engine.add(p, Wish(ending=Ending(6)), i)[0] for i, p in enumerate(PROMPTS)]
        engine.step()
        assert len(engine.at_work.running) <= 2 and engine.at_work.waiting
        engine.cancel(rows[0])
        engine.cancel(rows[3])
        late = engine.add(PROMPTS[0], Wish(ending=Ending(6)), 0)[0]
        while not engine.idle:
            engine.step()
        assert [r.reason for r in rows] == ["cancelled", "length", "length", "cancelled"]
        assert [rows[1].new, rows[2].new, late.new] == [alone[1], alone[2], alone[0]]
        assert engine.at_work.pages.used == 0
    with engine.opened(16), pytest.raises(Refused, match="the cache holds 16 tokens"):
        engine.check([1] * 20, Wish(ending=Ending(8)))


def test_pages_are_shared_by_their_tokens_only():
    pages = Pages(6, 2)
    table = pages.take(3)
    pages.publish([1, 2, 3, 4, 5], table, 0, 5)
    assert pages.match([1, 2, 3, 4, 9]) == table[:2] and pages.match([1, 2, 9, 9, 9]) == table[:1]
    assert pages.match([3, 4, 5]) == [] and pages.match([1, 2, 3], salt=1) == []
    for used in (table, table[:2], table[:1]):
        pages.give_back(used)
    assert (pages.used, pages.remembered, pages.available) == (0, 2, 6)
    assert len(set(pages.take(6))) == 6 and pages.match([1, 2, 3]) == []
    with pytest.raises(RuntimeError, match="available"):
        pages.take(1)


# ---- what is chosen ------------------------------------------------------------------------------------------------


def test_penalties_and_biases_are_those_of_transformers(tmp_path):
    theirs, engine = twin_engine("gpt2", tmp_path, CONFIG)
    for prompt in LONG[:2]:
        wanted = theirs.generate(**padded([prompt]), max_new_tokens=12, do_sample=False, repetition_penalty=1.3)
        ((row,),) = engine.answer([prompt], Wish(Sampling(repetition_penalty=1.3), Ending(12)))
        assert row.new == wanted[0, len(prompt) :].tolist()
    never = Sampling(logit_bias=tuple((t, -100.0) for t in range(130)))
    assert engine.answer([[5]], Wish(never, Ending(4)))[0][0].new == [130] * 4
    once = engine.answer([[5]], Wish(Sampling(presence_penalty=2.0, frequency_penalty=2.0), Ending(12)))[0][0].new
    plain = engine.answer([[5]], Wish(ending=Ending(12)))[0][0].new
    assert len(set(once)) >= len(set(plain))


def test_min_p_and_best_of():
    engine = make_engine("llama")
    for row in engine.answer([[5]], Wish(Sampling(2.0, min_p=1.0), Ending(8), n=2))[0]:
        assert row.new == engine.generate([[5]], 8).tokens[0]
    rows = engine.answer([[5]], Wish(Sampling(1.0), Ending(8), n=2, best_of=5))[0]
    everyone = engine.answer([[5]], Wish(Sampling(1.0), Ending(8), n=5))[0]
    means = sorted((sum(r.logprobs) for r in everyone), reverse=True)
    assert [sum(r.logprobs) for r in rows] == pytest.approx(means[:2])


def test_stop_texts():
    engine = make_engine("llama")
    free = engine.answer([[5]], Wish(ending=Ending(12)))[0][0].new
    text = " ".join(map(str, free))
    stop = f"{free[4]} {free[5]}"
    ((row,),) = engine.answer([[5]], Wish(ending=Ending(12, stop=(stop,))))
    assert row.reason == "stop" and row.text.whole.strip() == text.split(stop)[0].strip() and len(row.new) <= 6


def test_text_comes_in_pieces_that_are_the_whole():
    words = {0: "Gr", 1: "\N{REPLACEMENT CHARACTER}", 2: "n", 3: " e"}

    class Bytes:
        def decode(self, ids):
            return "".join(words[i] for i in ids).replace("\N{REPLACEMENT CHARACTER}" * 2, "ü")

    text = Text(Bytes(), [3])
    assert [text.add(i) for i in (0, 1, 1, 2)] == ["Gr", "", "ü", "n"] and text.finish() == ""
    assert text.whole == "Grün"
    held = Text(Bytes(), [], ("n ex",))
    assert [(held.add(i), held.safe)[1] for i in (0, 2, 3, 3)] == [2, 2, 2, 7]


def test_answers_follow_a_grammar():
    pytest.importorskip("llguidance")
    model = make_model("llama")

    class Letters(NullTokenizer):
        """One character per token."""

        def encode(self, text):
            return [ord(c) for c in text if ord(c) < 128]

        def decode(self, ids):
            return "".join(chr(i) if 0 < i < 128 else "" for i in ids)

    engine = Engine(model, Letters(131), EngineConfig(page=4))
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"], "additionalProperties": False}
    sampling = Sampling(1.0, seed=3, logit_bias=tuple((ord(c), -100.0) for c in " \t\r\n"))
    wish = Wish(sampling, Ending(20, frozenset({0})), grammar=("json_schema", json.dumps(schema)))
    ((row,),) = engine.answer([[65]], wish)
    assert row.reason == "stop" and json.loads(engine.tokenizer.decode(row.new))["a"] <= 99
    ((row,),) = engine.answer([[65]], Wish(sampling, Ending(20), grammar=("regex", "[ab]{3}c")))
    assert re.fullmatch("[ab]{3}c", engine.tokenizer.decode(row.new)) and row.reason == "stop"
    for grammar, why in (
        (("regex", "("), "unclosed group"),
        (("json_schema", '{"type":\n3}\n'), "type must be a string"),
    ):
        with pytest.raises(
            Refused, match=f"cannot be read: {why}(.|\n)*try:    --{grammar[0].replace('_', '-')}"
        ) as no:
            engine.answer([[65]], Wish(sampling, Ending(20), grammar=grammar))
        assert len(str(no.value).splitlines()) == 3


@pytest.mark.parametrize(
    "config, draft, words",
    [
        (EngineConfig(0, 0, 0, lookahead=9), None, ["--max-batch 0", "--page 0", "--chunk 0", "--lookahead 9"]),
        (EngineConfig(speculate="draft"), None, ["without a draft model"]),
        (EngineConfig(speculate="guess"), None, ["--speculate guess"]),
        (EngineConfig(speculate="mtp"), None, ["--speculate mtp", "mtp_num_layers"]),
    ],
)  # fmt: skip
def test_engines_that_cannot_be(config, draft, words):
    with pytest.raises(Refused) as refusal:
        Engine(make_model("gpt"), None, config, draft)
    assert all(word in str(refusal.value) for word in words)


def test_wishes_that_cannot_be():
    engine = make_engine("gpt")
    wrong = Sampling(0.0, min_p=2.0, repetition_penalty=0.0, presence_penalty=3.0, frequency_penalty=-3.0,
                     logit_bias=((1, 101.0), (131, 0.0)))  # fmt: skip
    with pytest.raises(Refused) as refusal:
        engine.answer([[1]], Wish(wrong, Ending(3, frozenset({131}), ("",)), n=3, best_of=2, tops=21))
    for word in ("--min-p", "--repetition-penalty", "--presence-penalty", "--frequency-penalty", "--logit-bias",
                 "--stop with an empty text", "--n 3", "--best-of 2", "--logprobs 21", "token 131"):  # fmt: skip
        assert word in str(refusal.value)
    with pytest.raises(Refused, match="--num-beams 0"):
        search(engine, [[1]], Wish(), Beams(0))
    with pytest.raises(Refused, match="draws nothing"):
        search(engine, [[1]], Wish(Sampling(1.0)), Beams(2))
