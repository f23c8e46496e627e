"""T5 and T5 v1.1 against `transformers` in float32, and their way to a Hugging Face directory and back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from isotron.cli import main
from isotron.core.batch import Batch
from isotron.core.errors import Refused
from isotron.core.layout import whole
from isotron.core.mesh import Mesh
from isotron.core.models.t5_config import T5Config
from isotron.core.nn.relative import bucket
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.hub.live import from_hf, to_hf
from isotron.hub.reader import HFSource
from isotron.inference.config import Ending, EngineConfig, Sampling, Wish
from isotron.inference.generate import source_of, unknown_sentinels
from isotron.inference.pairs import PairEngine

pytest.importorskip("transformers")
V, E, S = 131, 200, 90
SIZES = {"vocab_size": V, "d_model": 64, "d_kv": 12, "d_ff": 48, "num_heads": 4, "num_layers": 2,
         "num_decoder_layers": 3, "decoder_start_token_id": 0,
         "dropout_rate": 0.0}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "t5": SIZES,
    "v1.1": {**SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
             "relative_attention_num_buckets": 16, "relative_attention_max_distance": 50},
}  # fmt: skip


def twin_of(kind: str) -> Any:
    """The model of the other library with every weight random."""
    import transformers

    twin = transformers.T5ForConditionalGeneration(transformers.T5Config(**KINDS[kind])).eval()
    if kind == "v1.1":
        twin.lm_head.weight = torch.nn.Parameter(twin.shared.weight.detach().clone())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in twin.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.3 + 1.0 if p.ndim == 1 else noise * 0.08)
    return twin


def batch() -> Batch:
    """Two pairs; the second row of the encoder is padded."""
    draw = torch.Generator().manual_seed(3)
    rows, source = (torch.randint(0, V, (2, n), generator=draw) for n in (S + 1, E))
    mask = torch.rand(2, S, generator=draw).gt(0.3).float()
    positions = torch.arange(S).expand(2, -1)
    lengths = torch.tensor([E, E - 37])
    return Batch(rows[:, :-1], rows[:, 1:], mask, positions, torch.arange(2), source=source, source_lengths=lengths)


def close(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape, what
    assert (a - b).abs().max() <= 1e-5 * b.abs().max(), f"{what}: {(a - b).abs().max()} of {b.abs().max()}"


@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_the_way_back(kind: str, tmp_path: Path) -> None:
    import transformers

    twin, data = twin_of(kind), batch()
    twin.save_pretrained(tmp_path / "theirs")
    model = from_hf(tmp_path / "theirs", Layout(dp=1, make_vocab_size_divisible_by=64))
    (stage,) = model.stages.values()
    seen = (torch.arange(E) < data.source_lengths[:, None]).long()  # type: ignore[index]
    theirs = twin(input_ids=data.source, attention_mask=seen, decoder_input_ids=data.tokens).logits
    losses = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), data.labels.flatten(), reduction="none")
    weight = 1 / float(data.loss_mask.sum())
    (losses * data.loss_mask.flatten()).sum().mul(weight).backward()
    _, ours = stage.module.eval().logits(data, {})
    close("logits", ours, theirs.detach())

    to_hf(model, tmp_path / "ours", like=tmp_path / "theirs")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(p, q) for p, q in zip(twin.parameters(), again.parameters(), strict=True))
    assert torch.equal(again.eval()(input_ids=data.source, attention_mask=seen, decoder_input_ids=data.tokens).logits,
                       theirs)  # fmt: skip

    model.forward_backward([data], weight)
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(p.grad)
    twin.save_pretrained(tmp_path / "gradients")
    wanted = HFSource(tmp_path / "gradients", check_head=False)
    assert set(stage.flat.sinks) == set(wanted.names())
    for name, sink in stage.flat.sinks.items():
        dtype, shape = wanted.info(name)
        found = torch.full(shape, torch.nan, dtype=dtype)
        wanted.read(name, whole(shape), found)
        close(name, sink.buffer[: len(found)], found)


@pytest.mark.parametrize("kind", [pytest.param("t5", marks=pytest.mark.slow), "v1.1"])
def test_writes_what_the_other_library_writes(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy, token for token: prompts of several lengths in batches of three, ends at different places."""
    twin = twin_of(kind)
    twin.generation_config.eos_token_id = 40
    twin.save_pretrained(tmp_path)
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, V, (n,), generator=draw).tolist() for n in (30, 7, 150, 1)]
    theirs = [twin.generate(torch.tensor([p]), max_new_tokens=24, do_sample=False, use_cache=False)[0, 1:].tolist()
              for p in prompts]  # fmt: skip
    engine = PairEngine(from_hf(tmp_path, Layout(dp=1)), None, EngineConfig(rows=3))
    free = engine.generate(prompts, 24, stop_ids=())
    assert all(ours[: len(row)] == row for ours, row in zip(free.tokens, theirs, strict=True))
    stops = tuple({row[5] for row in free.tokens[:2]})  # some rows end early, the others go on in a smaller batch
    found = engine.generate(prompts, 24, stop_ids=stops)
    for ours, row, reason in zip(found.tokens, free.tokens, found.reasons, strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in stops), 24)
        assert ours == row[:end] and reason == ("stop" if row[end - 1] in stops else "length")
    assert min(map(len, found.tokens)) < 24 and engine.model.stages[0].module.training
    drawn = engine.answer(prompts, Wish(Sampling(1.0), Ending(9), n=2, best_of=3))
    assert [len(rows) for rows in drawn] == [2] * 4 and drawn[0][0].new != drawn[0][1].new
    text = " ".join(map(str, prompts[0]))
    words = ["generate", "--load", str(tmp_path), "--max-new-tokens", "9", "--temperature", "0", "--json"]
    assert main([*words, "--prompt", text]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["results"]
    own = twin.generate(torch.tensor([[*prompts[0], 40]]), max_new_tokens=9, do_sample=False, use_cache=False)
    assert answer["prompt_tokens"] == [*prompts[0], 40] and answer["tokens"] == own[0, 1:].tolist()
    assert main([*words, "--prompt", text, "--num-beams", "2"]) == 2 and main([*words, "--prompt", "-4"]) == 2
    err = capsys.readouterr().err
    assert "--num-beams 2" in err and "token by token" in err
    with pytest.raises(Refused, match="it has no token"):
        engine.generate([[]], 3)


def test_a_prompt_names_sentinels() -> None:
    letters: Any = SimpleNamespace(extra_ids=(900, 899), encode=lambda text: [ord(c) for c in text])
    assert source_of(letters, "a<extra_id_1>b<extra_id_0>") == [97, 899, 98, 900]
    assert source_of(letters, "<extra_id_2>") == [ord(c) for c in "<extra_id_2>"]  # there is none of this number
    plain: Any = SimpleNamespace(encode=letters.encode)
    assert source_of(plain, "<extra_id_1>") == letters.encode("<extra_id_1>")
    (line,) = unknown_sentinels(letters, ["<extra_id_0> <extra_id_2>", "and <extra_id_2>"])
    assert "<extra_id_2> is read as text" in line and "<extra_id_0> to <extra_id_1>\n" in line
    assert "are: none" in unknown_sentinels(plain, ["<extra_id_0>"])[0] and unknown_sentinels(plain, ["a <b>"]) == []


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (16, 50), (8, 20)])
def test_buckets_are_the_other_librarys(buckets: int, farthest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    apart = torch.arange(-600, 600)
    for causal in (False, True):
        theirs = T5Attention._relative_position_bucket(apart, not causal, buckets, farthest)
        assert torch.equal(bucket(apart, buckets, farthest, causal), theirs)


def test_commands_convert_it_and_say_what_they_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin_of("v1.1").save_pretrained(tmp_path / "theirs")
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main(["convert", str(tmp_path / "theirs"), str(ours), "--to", "isotron"]) == 0
    assert main(["convert", str(ours), str(back), "--to", "hf"]) == 0
    files = [safetensors.torch.load_file(d / "model.safetensors") for d in (tmp_path / "theirs", back)]
    assert files[0].keys() == files[1].keys() and all(torch.equal(t, files[1][name]) for name, t in files[0].items())
    assert main(["inspect", str(ours)]) == 0
    capsys.readouterr()
    for verb, *words in (["score", "--text", "x"], ["evaluate", "--task", "lambada=x"]):
        assert main([verb, "--load", str(ours), *words]) == 2
        assert "this command runs decoders alone" in capsys.readouterr().err
    assert main(["compare", str(ours), str(back)]) == 2 and "two streams of tokens" in capsys.readouterr().err
    assert main(["convert", str(ours), str(tmp_path / "m"), "--to", "megatron"]) == 2
    assert (
        main(["plan", "--model", "t5-base", "--gpus", "2", "--global-batch", "16", "--out", str(tmp_path / "p.toml")])
        == 0
    )
    said = capsys.readouterr().out
    assert "0.22 billion parameters on 2 x h100" in said and " x 512 + 120 tokens, " in said
    assert "tokens/s of the encoder's rows" in said and "palm" not in said
    assert main(["train", "--config", str(tmp_path / "p.toml"), "--device", "cpu", "--print-config"]) == 0
    capsys.readouterr()
    few = ["--mock-data", "--train-iters", "2", "--seq-length", "64", "--decoder-seq-length", "16", "--eval-iters", "1"]
    assert main(["train", "--load", str(ours), *few, "--save", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert "validation loss at iteration 2" in capsys.readouterr().out
    assert main(["train", "--load", str(tmp_path / "run"), "--encoder-num-layers", "3"]) == 2
    assert "the checkpoint's encoder_num_layers is 2" in capsys.readouterr().err
    assert main(["train", "--family", "t5", *few, "--vocab-size", "4", "--device", "cpu"]) == 2
    assert "3 sentinels below 4" in capsys.readouterr().err


def test_layouts_that_are_not_for_two_streams_are_refused() -> None:
    layout = Layout(cp=2, ep=2, attention_backend="flash", cpu_offloading=True, distribute_saved_activations=True,
                    fp32_residual_connection=True)  # fmt: skip
    with pytest.raises(Refused) as refused:
        ParallelModel(T5Config(vocab_size=V), layout, Mesh(), torch.float32, torch.device("cpu"), 1)
    assert len(refused.value.problems) == 6 and "--cp 2 with family t5" in str(refused.value)
    T5Config(vocab_size=V).check_layout(Layout(tp=2, pp=2, dp=2, zero=3, recompute="full"))


def test_what_begins_smaller_does_so_in_every_layout() -> None:
    """Queries begin 1/sqrt(head size) smaller than keys and values: scores are not scaled."""
    model = ParallelModel(T5Config(1, 1, 64, 4, 16, 96, V), Layout(dp=1), Mesh(), torch.float32, torch.device("cpu"), 1)
    weights = {name: pieces for name, _, pieces in model.weight_pieces()}
    ((_, qkv),) = weights["layers.0.attention.qkv.weight"]
    assert float(qkv[:64].std() * 4 / qkv[64:].std()) == pytest.approx(1, rel=0.05)
    assert float(qkv[64:].std()) == pytest.approx(64**-0.5, rel=0.05)
