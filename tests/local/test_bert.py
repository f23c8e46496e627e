"""BERT against `transformers` in float32, its way to a Hugging Face directory and back, and what commands say of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from isotron.cli import main
from isotron.config.load import load
from isotron.config.schema import from_dict
from isotron.core.batch import Batch
from isotron.core.errors import Refused
from isotron.core.layout import whole
from isotron.core.mesh import Mesh
from isotron.core.models.bert_config import BertConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.hub.compare import differences, our_activations, their_activations
from isotron.hub.live import from_hf, to_hf
from isotron.hub.reader import HFSource

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
V, S, PADDED = 131, 40, 13
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
                         "num_attention_heads": 4, "max_position_embeddings": 64, "type_vocab_size": 3,
                         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "tied": SIZES,
    "untied": {**SIZES, "hidden_act": "gelu_new", "tie_word_embeddings": False, "layer_norm_eps": 1e-6},
}


def twin_of(kind: str) -> Any:
    """The model of the other library with every weight random."""
    import transformers

    twin = transformers.BertForMaskedLM(transformers.BertConfig(**KINDS[kind])).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in twin.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.3 + 1.0 if p.ndim == 1 else noise * 0.08)
    return twin


def batch() -> Batch:
    """Two rows with types; the second ends in padding, which is a document of its own."""
    draw = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(1, V, (2, 2, S), generator=draw)  # the other library learns nothing of id 0
    mask, positions = torch.rand(2, S, generator=draw).gt(0.7).float(), torch.arange(S).expand(2, -1)
    docs = torch.zeros(2, S, dtype=torch.int64)
    docs[1, S - PADDED :], mask[1, S - PADDED :] = 1, 0
    return Batch(tokens, labels, mask, positions, torch.arange(2), docs,
                 types=torch.randint(0, 3, (2, S), generator=draw))  # fmt: skip


def close(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape, what
    assert (a - b).abs().max() <= 1e-5 * b.abs().max(), f"{what}: {(a - b).abs().max()} of {b.abs().max()}"


def used(twin: Any) -> dict[str, torch.Tensor]:
    """Its parameters by name; an output layer that is not tied has a bias of its own, and nobody reads the other."""
    both = twin.config.tie_word_embeddings
    return {name: p for name, p in twin.named_parameters() if both or name != "cls.predictions.bias"}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_gradients_and_the_way_back(kind: str, tmp_path: Path) -> None:
    import transformers

    twin, data = twin_of(kind), batch()
    twin.save_pretrained(tmp_path / "theirs")
    model = from_hf(tmp_path / "theirs", Layout(dp=1, make_vocab_size_divisible_by=64))
    (stage,) = model.stages.values()
    assert data.doc_ids is not None
    seen = 1 - data.doc_ids
    theirs = twin(input_ids=data.tokens, attention_mask=seen, token_type_ids=data.types).logits
    losses = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), data.labels.flatten(), reduction="none")
    weight = 1 / float(data.loss_mask.sum())
    (losses * data.loss_mask.flatten()).sum().mul(weight).backward()
    _, ours = stage.module.eval().logits(data, {})
    close("logits", ours[seen.bool()], theirs.detach()[seen.bool()])

    to_hf(model, tmp_path / "ours", like=tmp_path / "theirs")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    assert all(torch.equal(p, used(again)[name]) for name, p in used(twin).items())
    assert torch.equal(again(input_ids=data.tokens, attention_mask=seen, token_type_ids=data.types).logits, theirs)

    model.forward_backward([data], weight)
    with torch.no_grad():
        for p in used(twin).values():
            p.copy_(p.grad)  # type: ignore[arg-type]
    twin.save_pretrained(tmp_path / "gradients")
    wanted = HFSource(tmp_path / "gradients", check_head=False)
    assert set(stage.flat.sinks) == set(wanted.names())
    for name, sink in stage.flat.sinks.items():
        dtype, shape = wanted.info(name)
        found = torch.full(shape, torch.nan, dtype=dtype)
        wanted.read(name, whole(shape), found)
        close(name, sink.buffer[: len(found)], found)


def test_the_first_published_files(tmp_path: Path) -> None:
    """Norms under older names, numbers of places, and what is for pairs of sentences; `compare` finds no difference."""
    twin_of("tied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        tensors = {name.replace(new, old): t for name, t in tensors.items()}
    tensors |= {"bert.embeddings.position_ids": torch.arange(64)[None], "bert.pooler.dense.bias": torch.zeros(64),
                "cls.seq_relationship.weight": torch.zeros(2, 64)}  # fmt: skip
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    edited = json.loads((tmp_path / "config.json").read_text()) | {"gradient_checkpointing": False}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    tokens = torch.randint(1, V, (2, 20), generator=torch.Generator().manual_seed(1))
    ours, theirs = (of(str(tmp_path), tokens, torch.float32) for of in (our_activations, their_activations))
    places = differences(ours, theirs, 1e-5)
    assert [p.what for p in places] == ["embedding", "layer 0", "layer 1", "layer 2", "logits"]
    assert all(p.close for p in places), places


def test_commands_take_it_or_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin_of("untied").save_pretrained(tmp_path / "theirs")
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main(["convert", str(tmp_path / "theirs"), str(ours), "--to", "isotron"]) == 0
    assert main(["convert", str(ours), str(back), "--to", "hf"]) == 0
    files = [safetensors.torch.load_file(d / "model.safetensors") for d in (tmp_path / "theirs", back)]
    files[0].pop("cls.predictions.bias")
    assert files[0].keys() == files[1].keys() and all(torch.equal(t, files[1][name]) for name, t in files[0].items())
    assert main(["inspect", str(ours)]) == 0 and main(["compare", str(ours), str(back)]) == 0
    capsys.readouterr()
    asks = (["generate", "--prompt", "x"], ["score", "--text", "x"], ["evaluate", "--task", "lambada=x"], ["serve"])
    for verb, *words in asks:
        assert main([verb, "--load", str(ours), *words]) == 2
        err = capsys.readouterr().err
        assert "fills in masked words" in err and "isotron train, which validates it" in err
    assert main(["convert", str(ours), str(tmp_path / "m"), "--to", "megatron"]) == 2
    assert main(["plan", "--model", "bert-large", "--tp", "2", "--cp", "2", "--dp", "2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert 334e6 < planned["parameters"] < 336e6 and planned["memory"]["fits"] and "time" in planned


FEW = ["--train-iters", "2", "--seq-length", "64", "--eval-iters", "1", "--device", "cpu"]


def test_trains_from_such_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin_of("tied").save_pretrained(tmp_path / "theirs")
    run = tmp_path / "run"
    assert main(["train", "--load", str(tmp_path / "theirs"), *FEW, "--mock-data", "--save", str(run)]) == 0
    assert "validation loss at iteration 2" in capsys.readouterr().out
    assert main(["train", "--load", str(run), "--norm-placement", "pre"]) == 2
    assert "the checkpoint's norm_placement is post" in capsys.readouterr().err
    pre = ["--family", "bert", "--norm-placement", "pre", "--num-layers", "2", "--hidden-size", "32",
           "--num-attention-heads", "2", "--vocab-size", "99"]  # fmt: skip
    assert main(["train", *pre, *FEW, "--mock-data", "--save", str(tmp_path / "pre")]) == 0
    assert main(["convert", str(tmp_path / "pre"), str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "norm_placement is 'pre', bert means 'post'" in capsys.readouterr().err


MEGATRON = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512
--micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 --weight-decay 1e-2 --clip-grad 1.0 --fp16 --lr 0.0001
--lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5 --lr-warmup-fraction .01 --tensor-model-parallel-size 8
--pipeline-model-parallel-size 16 --mock-data --vocab-size 30522 --bert-no-binary-head --mask-prob 0.15 --device cpu
--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --print-config --json"""


def test_the_launch_line_of_megatron() -> None:
    line = ["bash", str(ROOT / "examples" / "pretrain_bert.sh"), *MEGATRON.split()]
    done = subprocess.run(
        line, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}, check=False
    )
    assert done.returncode == 0, done.stderr
    config = from_dict(json.loads(done.stdout)["config"])
    model, data = config.model, config.data
    assert isinstance(model, BertConfig) and (model.norm_placement, model.norm_epsilon) == ("pre", 1e-5)
    assert (data.short_seq_prob, data.mask_prob, config.layout.world) == (0.1, 0.15, 128)
    assert "norm_placement pre" in done.stderr and "--bert-no-binary-head: no effect" in done.stderr
    assert load(["--family", "gpt", "--defaults", "megatron"])[0].data.short_seq_prob == 0.0


def test_layouts_that_are_not_for_it_are_refused() -> None:
    layout = Layout(ep=2, hybrid_context_parallel=True, fp32_residual_connection=True)
    with pytest.raises(Refused) as refused:
        ParallelModel(BertConfig(vocab_size=V), layout, Mesh(), torch.float32, torch.device("cpu"), 1)
    assert len(refused.value.problems) == 3 and "--ep 2 with family bert" in str(refused.value)
    BertConfig(vocab_size=V, norm_placement="pre").check_layout(Layout(cp=2, fp32_residual_connection=True))
