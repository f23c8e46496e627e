"""From a checkpoint to texts: weights alone, the stored tokenizer, JSON and plain output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isotron.commands import generate as command
from isotron.config.schema import changed, from_dict
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.weights import global_names, load_weights
from isotron.core.errors import Refused
from isotron.core.layout import Box
from isotron.inference import generate
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig
from isotron.train.verify import randomise
from tests.generation import make_engine, make_model, run_config, save_run

ASSETS = Path(__file__).resolve().parents[2] / "assets"


class Tensors:
    """A source of tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self):
        return list(self.tensors)

    def info(self, name):
        return self.tensors[name].dtype, tuple(self.tensors[name].shape)

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name][box.slices()])


def weights(model) -> dict[str, torch.Tensor]:
    return {name: pieces[0][1].clone() for name, _, pieces in model.weight_pieces() if len(pieces) == 1}


@pytest.mark.parametrize("name", ["gpt", "llama", "llama-tied"])
def test_weights_come_back(name, tmp_path):
    step = save_run(name, tmp_path)
    wanted = weights(make_model(name))
    model = make_model(name)
    randomise(model, 999)
    load_weights(model, Source(step))
    found = weights(model)
    assert found and all(torch.equal(found[n], wanted[n]) for n in found)
    assert not model.stages[0].module.head.weight[131:].any()
    saved = {n for n in Source(step).names() if not n.startswith("exp_avg/")}
    assert set(global_names(model.config, model.layout)) == saved and ("head.weight" in saved) == (name == "llama")


def test_names_and_shapes_are_compared_for_the_whole_model():
    model = make_model("gpt")
    shapes = {n: s for n, s, _ in model.weight_pieces()}
    tensors = {n: torch.zeros(s) for n, s in shapes.items()}
    load_weights(model, Tensors({**tensors, "master/x": torch.zeros(1), "exp_avg_sq/y": torch.zeros(1)}))
    with pytest.raises(Refused, match="foreign.weight"):
        load_weights(model, Tensors({**tensors, "foreign.weight": torch.zeros(1)}))
    with pytest.raises(Refused, match="layers.4.mlp.up.bias"):
        load_weights(model, Tensors({n: t for n, t in tensors.items() if n != "layers.4.mlp.up.bias"}))
    with pytest.raises(Refused, match=r"positions.weight has shape \[16, 32\]"):
        load_weights(model, Tensors({**tensors, "positions.weight": torch.zeros(16, 32)}))


def test_masters_are_read_as_weights():
    model = make_model("gpt", "float32")
    shapes = {n: s for n, s, _ in model.weight_pieces()}
    masters = {f"master/{n}": torch.full(s, 0.5) for n, s in shapes.items()}
    load_weights(model, Tensors({**masters, **{n: torch.zeros(s) for n, s in shapes.items()}}), prefix="master/")
    assert all(bool((t == 0.5).all()) for t in weights(model).values())


def config_of(step: Path, **leaves):
    """What the command line hands over: the checkpoint's own config, with options of this command."""
    saved = from_dict(Source(step).manifest.meta["config"])
    return changed(saved, load=str(step), tp=1, pp=1, dp=1, sequence_parallel=False, **leaves)


OPTIONS = {
    "prompts": ("5 17 99", "7"),
    "max_new_tokens": 6,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 0.0,
    "seed": 1,
    "ignore_eos": True,
    "json": False,
}


def test_texts(tmp_path, capsys):
    step = save_run("llama", tmp_path)
    out = make_engine("llama").generate([[5, 17, 99], [7]], 6, stop_ids=())
    assert generate.main(config_of(step), OPTIONS) == 0
    first, second = ("".join(f" {t}" for t in tokens) for tokens in out.tokens)
    assert capsys.readouterr().out == f"5 17 99{first}\n\n7{second}\n"
    assert generate.main(config_of(step), {**OPTIONS, "json": True}) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint"] == str(step)
    assert [r["tokens"] for r in report["results"]] == out.tokens
    assert report["results"][1] == {
        "prompt": "7",
        "text": second,
        "prompt_tokens": [7],
        "tokens": out.tokens[1],
        "logprobs": pytest.approx(out.logprobs[1], abs=1e-12),
        "finish_reason": "length",
    }


def test_a_run_directory_other_dtype_and_many_prompts(tmp_path, capsys):
    step = save_run("gpt", tmp_path)
    prompts = [[i] for i in range(40)]  # more than one batch
    out = make_engine("gpt").generate(prompts, 4, temperature=1.0, seed=5, stop_ids=())
    options = {**OPTIONS, "prompts": tuple(str(i) for i in range(40)), "max_new_tokens": 4, "json": True}
    config = changed(config_of(step), load=str(step.parent))
    assert generate.main(config, {**options, "temperature": 1.0, "seed": 5}) == 0
    assert [r["tokens"] for r in json.loads(capsys.readouterr().out)["results"]] == out.tokens
    assert generate.main(changed(config, dtype="bfloat16"), options) == 0


def test_the_end_of_a_document_is_not_printed(tmp_path, capsys, monkeypatch):
    step = save_run("gpt", tmp_path)
    new = make_engine("gpt").generate([[5]], 6, stop_ids=()).tokens[0]
    monkeypatch.setattr(generate.Engine, "_ends", lambda self: {new[2]})
    options = {**OPTIONS, "prompts": ("5",), "ignore_eos": False}
    assert generate.main(config_of(step), options) == 0
    stop = new.index(new[2])
    assert capsys.readouterr().out == "5" + "".join(f" {t}" for t in new[:stop]) + "\n"


def test_refusals(tmp_path):
    step = save_run("gpt", tmp_path)
    with pytest.raises(Refused, match="a layout of 2 processes on 1"):
        generate.main(changed(config_of(step), tp=2), OPTIONS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match="no complete checkpoint"):
        generate.main(changed(config_of(step), load=str(tmp_path / "empty")), OPTIONS)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--num-beams 0", "--num-beams 0"),
        ("--num-beams 100000", "--num-beams 100000"),
        ("--num-beams 2 --length-penalty 1e300", "--length-penalty 1e+300"),
        ("--num-beams 2 --speculate ngram", "--num-beams 2 --speculate ngram"),
        ("--n 1000000 --temperature 1", "--n 1000000 --best-of 0"),
        ("--page 99999999999 --chunk 99999999999 --max-batch 99999999999", "--max-batch 99999999999"),
        ("--json-schema {latin}", "--json-schema {latin}"),
        ("--json-schema {directory}", "--json-schema {directory}"),
    ],
)
def test_absurd_options_are_said_before_anything_is_loaded(words, asked, tmp_path):
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    words, asked = (
        text.replace("{latin}", f"{tmp_path}/latin.json").replace("{directory}", str(tmp_path))
        for text in (words, asked)
    )
    with pytest.raises(Refused) as refused:
        command.run(["--load", str(tmp_path / "nowhere"), "--prompt", "hi", *words.split()])
    assert asked in [p.asked for p in refused.value.problems]
    assert all(len(str(p).splitlines()) == 3 for p in refused.value.problems)


def test_which_tokenizer(tmp_path):
    plain = Source(save_run("gpt", tmp_path / "a", tokenizer=False))
    stored = Source(save_run("gpt", tmp_path / "b"))
    config = run_config("gpt")
    assert generate.find_tokenizer(config, plain.path, plain.manifest).vocab_size == 131
    assert generate.find_tokenizer(config, stored.path, stored.manifest).describe()["type"] == "NullTokenizer"
    other = changed(config, vocab_file=str(ASSETS / "gpt2/vocab.json"), merge_file=str(ASSETS / "gpt2/merges.txt"))
    assert generate.find_tokenizer(other, stored.path, stored.manifest).vocab_size == 50257
    lost = changed(config, tokenizer_model=str(tmp_path / "gone.model"))
    with pytest.raises(Refused, match="gone.model"):
        generate.find_tokenizer(lost, stored.path, stored.manifest)


def test_sizes_that_the_run_left_open():
    config = changed(run_config("gpt"), vocab_size=0, max_position_embeddings=0, seq_length=48)
    found = generate.with_sizes(config, build_tokenizer(TokenizerConfig("NullTokenizer"), 99)).model
    assert (found.vocab_size, found.max_position_embeddings) == (99, 48)


def test_the_space_before_a_continuation_is_kept():
    path = ASSETS / "sentencepiece/botchan_en_bpe_1000.model"
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=str(path)))
    ids = tokenizer.encode("I was a reckless boy")
    for cut in range(1, len(ids)):
        whole = tokenizer.decode(ids[:cut]) + generate.continuation(tokenizer, ids[:cut], ids[cut:])
        assert whole == tokenizer.decode(ids)
    assert generate.continuation(tokenizer, [], ids) == tokenizer.decode(ids)
