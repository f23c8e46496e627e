"""Flags, TOML, presets and checkpoints: order, spellings, provenance, and all problems at once."""

from __future__ import annotations

import shlex

import pytest

from isotron.config.argv import clean_words
from isotron.config.load import load, read
from isotron.config.schema import RunConfig, changed, from_dict, to_dict, value
from isotron.core.errors import Refused
from isotron.core.models.gpt_config import GPTConfig


def problems(line, checkpoint=None):
    return "\n\n".join(map(str, read(shlex.split(line), checkpoint).problems))


def test_no_words_are_the_defaults():
    config, provenance, notes = load([])
    assert config == RunConfig() and notes == ()
    assert set(provenance.values()) == {"default"}


def test_preset_below_checkpoint_below_toml_below_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[model]\nnum_layers = 5\n[layout]\ntp = 2\n[schedule]\nlr = 0.5\nmin_lr = 0.25\n")
    saved = to_dict(changed(load(["--preset", "llama-tiny"])[0], num_layers=5, lr=0.125, weight_decay=0.75, tp=8))
    config, origin, _ = load(shlex.split(f"--preset llama-tiny --config {file} --lr 1 --lr 2"), saved)
    got = {leaf: (value(config, leaf), origin[leaf]) for leaf in ("num_layers", "lr", "min_lr", "weight_decay", "tp")}
    assert got == {
        "num_layers": (5, str(file)),
        "lr": (2.0, "flag --lr 2"),
        "min_lr": (0.25, str(file)),
        "weight_decay": (0.75, "checkpoint"),
        "tp": (2, str(file)),  # the layout of the run that saved is not part of what is resumed
    }
    assert config.model.hidden_size == 64


def test_preset_in_toml_and_flags_over_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "gpt-tiny"\nnum_layers = 3\n')
    config, origin, _ = load(["--config", str(file), "--hidden-size=128"])
    assert config.model == GPTConfig(3, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    assert origin["num_attention_heads"] == "preset gpt-tiny" and origin["family"] == "preset gpt-tiny"


@pytest.mark.parametrize(
    ("line", "leaf", "wanted"),
    [
        ("--tp 2 --tensor-model-parallel-size 4", "tp", 4),
        ("--tensor-model-parallel-size 4 --tp 2", "tp", 2),
        ("--tp=8", "tp", 8),
        ("--sequence-parallel", "sequence_parallel", True),
        ("--sequence-parallel true --sequence-parallel false", "sequence_parallel", False),
        ("--sequence-parallel --no-sequence-parallel", "sequence_parallel", False),
        ("--no-overlap-grad-reduce", "overlap_grad_reduce", False),
        ("--data-path 0.3 a 0.7 b --seed 1", "data_path", ("0.3", "a", "0.7", "b")),
        ("--layers-per-stage 2,3,2", "layers_per_stage", (2, 3, 2)),
        ("--layers-per-stage 2 3 2", "layers_per_stage", (2, 3, 2)),
        ("--layers-per-stage 6.5,1.5", "layers_per_stage", (6.5, 1.5)),
        ("--optimizer adam", "optimizer", "adamw"),
        ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", "lr_warmup_iters", 0),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 5", "lr_warmup_iters", 5),
        ("--zero -1", "zero", -1),
    ],
)
def test_spellings(line, leaf, wanted):
    assert value(load(shlex.split(line))[0], leaf) == wanted


def test_a_command_pasted_on_one_line():
    words = shlex.split(r"--tp 2 \ --pp 3 \ --data-path a b \ --seed 7 \ ") + ["\\", " ", "\t --dp", "2"]
    assert clean_words(words)[-2:] == ["--dp", "2"] and "\\" not in clean_words(words)
    config = load(words)[0]
    assert (config.layout.tp, config.layout.pp, config.layout.dp, config.train.seed) == (2, 3, 2, 7)
    assert config.data.data_path == ("a", "b")
    assert clean_words(["--prompt", "", " - item", "a b"]) == ["--prompt", "", " - item", "a b"]


def test_every_problem_is_reported_together():
    text = problems("--hiden-size 3 --tp x --dtype float8 7 -pp 2 --seed --save-chekpoint d --mock-data=maybe run.toml")
    assert text.count("asked:") == 9
    for part in (
        "--hiden-size\nbut:    there is no such option\ntry:    --hidden-size",
        "'x' is not a whole number",
        "is not one of float64, float32, bfloat16, float16",
        "--save-checkpoint",
        "the value is missing",
        "-pp",
        "two dashes",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("run.toml", "--config run.toml"),
        ("--hidden_size 3", "--hidden-size"),
        ("--tensor-model-paralel-size 2", "--tensor-model-parallel-size"),
        ("--config nowhere.toml", "there is no such file"),
        ("--bf16=true", "--bf16 takes no value"),
        ("--no-hidden-size", "there is no such option"),
        ("--activation gelu_tanh", "only families gpt, neox, bert have activation"),
        (
            "--family gpt --rope-theta 5",
            "only families gemma2, gemma3, llama, mistral, mixtral, neox, olmo2, phi3, ",
        ),
        ("--preset gpt2 --family llama", "preset gpt2 is of family gpt"),
        ("--split", "the value is missing"),
        ("--optimizer soap", "no well-kept library has SOAP"),
    ],
)
def test_refusals(line, part):
    with pytest.raises(Refused) as refused:
        load(shlex.split(line))
    assert part in str(refused.value) and refused.value.exit_code == 2
    assert all(p.asked and p.case and p.fix for p in refused.value.problems)


def test_the_checkpoint_fixes_the_model():
    saved = to_dict(changed(load(["--family", "llama"])[0], num_layers=3, vocab_size=100, device="cpu"))
    config, origin, _ = load([], saved)
    assert config.model.num_layers == 3 and origin["num_layers"] == "checkpoint"
    assert config.train.device == "auto"
    assert "the checkpoint's num_layers is 3" in problems("--num-layers 4", saved)
    assert "checkpoint is of family llama" in problems("--family gpt", saved)
    config, _, notes = load(["--rope-theta", "500000", "--ffn-hidden-size", "2048"], saved)
    assert any("trained with 10000.0" in note for note in notes) and config.model.ffn == 2048


def test_a_config_that_cannot_be_read_is_reported_without_what_would_follow(tmp_path):
    broken = tmp_path / "run.toml"
    broken.write_text("[model\n")
    for path, said in (("nowhere.toml", "there is no such file"), (str(broken), "cannot be read as TOML")):
        with pytest.raises(Refused, match=said) as refused:
            read(["--config", path, "--activation", "gelu", "--train-samples", "7", "--bogus"])
        assert [p.asked for p in refused.value.problems] == ["--bogus", f"--config {path}"]


def test_another_size_than_the_checkpoints_is_one_problem_by_its_option(tmp_path):
    saved = to_dict(changed(load(["--family", "llama"])[0], vocab_size=100))
    loaded = read(["--hidden-size", "384", "--num-attention-heads", "6"], saved)
    assert [(p.asked, p.fix.split(" as ")[0]) for p in loaded.problems] == [
        ("--load with --hidden-size 384", "--hidden-size 768"),
        ("--load with --num-attention-heads 6", "--num-attention-heads 12"),
    ]
    assert {"hidden_size", "num_attention_heads"} <= loaded.doubtful
    assert "--load with --num-query-groups 3" in problems("--num-query-groups 3", saved)
    file = tmp_path / "run.toml"
    file.write_text("[model]\nffn_hidden_size = 64\n")
    (problem,) = read(["--config", str(file)], saved).problems
    assert problem.asked == f"--load with ffn_hidden_size 64 ({file})" and "--ffn-hidden-size 2048 as" in problem.fix


def test_the_decay_follows_a_continued_run_unless_it_was_given():
    saved = to_dict(changed(RunConfig(), train_iters=10, lr_decay_iters=10))
    config, _, notes = load(["--train-iters", "20"], saved)
    assert config.schedule.lr_decay_iters == 0 and "--lr-decay-iters 10 keeps it" in notes[0]
    assert "from now on: the learning rate;" in notes[0]
    assert load(["--train-iters", "10"], saved)[2] == ()
    ramp = {"lr_decay_style": "constant", "weight_decay_incr_style": "linear", "lr_warmup_fraction": 0.1}
    _, _, notes = load(["--train-iters", "20"], to_dict(changed(from_dict(saved), **ramp)))
    assert "from now on: its warm-up (a fraction of that), weight decay;" in notes[0]
    saved = to_dict(changed(RunConfig(), train_iters=10, lr_decay_iters=30))
    config, _, notes = load(["--train-iters", "20"], saved)
    assert config.schedule.lr_decay_iters == 30 and notes == ()


def test_megatron_defaults_are_named():
    config, origin, notes = load(["--defaults", "megatron"])
    assert config.model.family == "gpt" and config.train.train_iters == 500000 and config.optim.adam_beta2 == 0.999
    assert origin["train_iters"] == "--defaults megatron" and "train_iters 500000" in notes[0]
    assert load(["--defaults", "megatron", "--train-iters", "3"])[0].train.train_iters == 3
    assert "lr 0.0003 (isotron's default" in notes[0]
    assert "lr 0.0003" not in load(["--defaults", "megatron", "--lr", "0.0003"])[2][0]


def test_a_spelling_never_changes_the_model():
    ours, theirs = load(["--tp", "2"]), load(["--tensor-model-parallel-size", "2"])
    assert ours[0] == theirs[0]
    assert "--defaults megatron" in theirs[2][0]
