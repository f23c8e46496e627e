"""The command `isotron` in this process: verbs, help, errors, notes, and the launch lines that users arrive with."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from isotron import cli
from isotron.commands import train as train_command
from isotron.config.schema import RunConfig, from_dict, to_dict
from isotron.core.checkpoint.format import Manifest
from isotron.core.errors import Problem, Refused

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--device",
    "cpu",
]
RUN = [*SMALL, "--mock-data", "--vocab-size", "100", "--train-iters", "3"]
PRETRAIN = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 2 "
    "--global-batch-size 128 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --data-path my_gpt "
    "--vocab-file vocab.json --merge-file merges.txt --save-interval 1000 --save-checkpoint ./checkpoints "
    "--load-checkpoint ./checkpoints"
)


@pytest.fixture
def started(monkeypatch):
    """What would be started: (target, processes, arguments) instead of processes."""
    calls = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("isotron.launch.run_local", lambda *call: calls.append(call) or 0)
    monkeypatch.setattr(train_command, "run_local", lambda *call: calls.append(call) or 0)
    return calls


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A directory with the tokenizer and the data of the launch lines."""
    monkeypatch.chdir(tmp_path)
    letters = "abcdefghijklmnopqrstuvwxyz"
    byte_level = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    rest = [chr(c) for c in range(161, 173)] + [chr(c) for c in range(174, 256)] + [chr(256 + n) for n in range(68)]
    vocab = {t: i for i, t in enumerate(dict.fromkeys([*byte_level, *rest, "ab", "<|endoftext|>"]))}
    Path("vocab.json").write_text(json.dumps(vocab))
    Path("merges.txt").write_text("#version: 0.2\na b\n")
    Path("my_corpus.json").write_text("".join(json.dumps({"text": f"{a}b {letters}"}) + "\n" for a in letters))
    for end in (".bin", ".idx"):
        Path(f"my_gpt_text_document{end}").write_bytes(b"")
    return tmp_path


def run(words, capsys):
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out, err


def three_lines(err):
    blocks = [b.splitlines() for b in err.strip().split("\n\n")]
    assert all([line[:8] for line in b] == ["asked:  ", "but:    ", "try:    "] for b in blocks), err
    return blocks


def test_help_is_quick_and_teaches():
    begun = time.monotonic()
    result = subprocess.run([sys.executable, "-m", "isotron", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0 and time.monotonic() - begun < 2  # half a second on an idle machine
    for name in cli.VERBS:
        assert f"  {name} " in result.stdout and f"isotron {name} " in result.stdout


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_every_verb(verb, capsys):
    code, out, err = run([verb, "--help"], capsys)
    assert code == 0 and err == "" and f"isotron {verb}" in out and "--json" in out


def test_help_shows_sections_defaults_and_both_spellings(capsys):
    out = run(["train", "--help"], capsys)[1]
    assert "[layout]\n  --tp, --tensor-model-parallel-size" in out
    assert "(default: gpt 0.1, t5 0.1, bert 0.1, others 0.0)" in out and "--no-tensorboard" in out
    families = "gemma2, gemma3, mistral, mixtral, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, gpt_oss"
    assert f"[{families} only]" in " ".join(out.split())
    assert "[not t5]" in out and "qwen3-8b" in out and "one of gpt, gemma2, gemma3," in " ".join(out.split())
    model = out[out.index("[model]") : out.index("[data]")]
    assert model.index("--rope-theta") < model.index("--num-key-value-heads") < model.index("--rope-scaling ")
    assert "each to files of its own (default: text)" in " ".join(run(["preprocess", "--help"], capsys)[1].split())


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian"], ["there is no such verb", "isotron train"]),
        (["frobnicate"], ["there is no such verb", "preprocess"]),
        (["retrieval"], ["retrieval is not built yet", "isotron train"]),
        (["serve", "--prot", "1"], ["--load not given", "--port"]),
        (["train", "--hiden-size", "3"], ["--hidden-size"]),
        (["doctor", "--jsn"], ["--json"]),
        (["generate", "--prompt", "a"], ["--load not given"]),
        (
            ["generate", "--load", "nowhere", "--top-p", "2", "--num-layers", "3"],
            ["no such directory", "--top-p 0.9", "isotron train"],
        ),
        (
            ["preprocess", "--workers", "-1"],
            ["--input not given", "--output-prefix not given", "--workers -1", "--vocab-file"],
        ),
    ],
)
def test_errors_are_three_lines_and_exit_2(words, parts, capsys, started):
    code, out, err = run(words, capsys)
    assert code == 2 and out == ""
    three_lines(err)
    assert all(part in err for part in parts), err


def test_no_verb_shows_the_help(capsys):
    code, out, _ = run([], capsys)
    assert code == 2 and "isotron train --config run.toml" in out
    assert run(["--version"], capsys)[1].startswith("isotron ")


def test_traceback_only_when_asked_for(capsys, monkeypatch):
    assert "Traceback" not in run(["trian"], capsys)[2]
    monkeypatch.setenv("ISOTRON_DEBUG", "1")
    assert "Traceback" in run(["trian"], capsys)[2]


def test_exit_codes_of_failures(capsys, monkeypatch):
    def fail(error):
        monkeypatch.setattr("isotron.cli._dispatch", lambda words, is_process: (_ for _ in ()).throw(error))
        return run([], capsys)[0]

    assert fail(Refused([Problem("a", "b", "c")], exit_code=1)) == 1
    assert fail(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())


def test_other_ranks_leave_the_first_one_time_to_speak(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    waited = []
    monkeypatch.setattr("isotron.cli.time.sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    code, _, err = run(["trian"], capsys)
    assert (code, waited) == (2, [(cli.SECONDS_FOR_FIRST_RANK, "")]) and "asked:  isotron trian" in err


def test_all_problems_of_a_command_together(capsys, started):
    code, _, err = run(["train", *RUN, "--tp", "3", "--global-batch-size", "x", "--load", "nowhere", "--bogus"], capsys)
    assert code == 2 and not started
    asked = [b[0] for b in three_lines(err)]
    assert [any(part in a for a in asked) for part in ("--tp 3", "-batch-size x", "--load nowhere", "--bogus")] == [
        True
    ] * 4


def test_a_checkpoint_that_is_not_found_is_reported_without_what_it_would_have_given(capsys, started):
    code, _, err = run(["train", "--load", "nowhere", "--hidden-size", "130", "--device", "cpu"], capsys)
    assert code == 2 and [b[0] for b in three_lines(err)] == ["asked:  --load nowhere"]
    err = run(["train", "--load", "nowhere", "--lr", "1", "--min-lr", "2", "--device", "cpu"], capsys)[2]
    assert [b[0] for b in three_lines(err)] == ["asked:  --load nowhere", "asked:  --min-lr 2.0 --lr 1.0"]


def test_train_starts_the_processes_of_the_layout(capsys, started, tmp_path):
    save = str(tmp_path / "run")
    code, _, err = run(["train", *RUN, "--tp", "2", "--pp", "2", "--save", save, "--load", save], capsys)
    assert code == 0 and "a new run starts" in err
    ((target, processes, (config, directory)),) = started
    assert (target, processes, directory) == ("isotron.commands.train_rank:main", 4, save)
    assert (config.layout.dp, config.train.global_batch_size, config.model.max_position_embeddings) == (1, 1, 32)
    assert config.checkpoint.load == "" and config.checkpoint.save == config.log.run_dir == save


def test_a_run_without_a_directory_gets_one_by_time(capsys, started):
    assert run(["train", *RUN], capsys)[0] == 0
    assert started[0][2][1].startswith("runs/20")
    assert started[0][2][0].checkpoint.save == started[0][2][1]


def test_a_launcher_must_fit_the_layout(capsys, started, monkeypatch):
    for name, text in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    code, _, err = run(["train", *RUN, "--tp", "2", "--dp", "1"], capsys)
    assert code == 2 and "2 ranks, and the launcher started 4 processes" in err and "--dp 2" in err
    assert run(["train", *RUN, "--tp", "2"], capsys)[0] == 0
    ((_, processes, (config, directory)),) = started
    assert processes == 1 and config.layout.dp == 2 and directory == f"runs/torchrun-{os.getppid()}-1"


def test_resume_reads_the_model_from_the_checkpoint(capsys, started, tmp_path):
    step = tmp_path / "step_00000005"
    step.mkdir()
    saved = {
        **to_dict(RunConfig()),
        "model": {"family": "gpt", "num_layers": 7, "vocab_size": 11, "max_position_embeddings": 64},
    }
    (step / "manifest.json").write_bytes(Manifest(5, {"config": saved}, {}, {}).dumps())
    (tmp_path / "latest").write_text(step.name)
    words = ["--load", str(tmp_path), "--device", "cpu", "--mock-data", "--train-iters", "9", "--seq-length", "64"]
    assert run(["train", *words], capsys)[0] == 0
    assert (started[0][2][0].model.num_layers, started[0][2][0].checkpoint.load) == (7, str(tmp_path))
    code, _, err = run(["train", *words, "--num-layers", "8"], capsys)
    assert code == 2 and "the checkpoint's num_layers is 7" in err
    assert (
        run(
            ["generate", "--load", str(tmp_path), "--prompt", "a b", "--prompt", "c", "--device", "cpu", "--pp", "2"],
            capsys,
        )[0]
        == 0
    )
    target, processes, (config, options) = started[-1]
    assert (target, processes, config.checkpoint.load) == ("isotron.inference.generate:main", 2, str(step))
    assert options["prompts"] == ("a b", "c") and options["max_new_tokens"] == 64 and not options["ignore_eos"]


def test_verify_hands_on_the_users_config(capsys, started, monkeypatch):
    calls = []
    monkeypatch.setattr("isotron.train.selfcheck.main", lambda config, **rest: calls.append((config, rest)) or 1)
    assert run(["verify", *SMALL[:-2], "--tp", "2", "--inject", "drop-allreduce", "--json"], capsys)[0] == 1
    ((config, rest),) = calls
    assert (config.layout.tp, config.model.num_layers, config.train.device) == (2, 2, "cpu")
    assert rest == {"inject": "drop-allreduce", "as_json": True}
    assert "--tp 3" in run(["verify", *SMALL, "--tp", "3", "--load", "nowhere"], capsys)[2]
    assert "--load nowhere" in run(["verify", *SMALL, "--load", "nowhere"], capsys)[2]


def test_print_config_as_toml_and_json(capsys, started):
    code, out, _ = run(["train", *RUN, "--print-config"], capsys)
    assert code == 0 and not started
    assert "hidden_size = 64                             # flag --hidden-size 64" in out
    assert "dp = 1                                       # derived" in out
    shown = json.loads(run(["train", *RUN, "--print-config", "--json"], capsys)[1])
    assert from_dict(shown["config"]).model.hidden_size == 64 and shown["provenance"]["tp"] == "default"


def test_print_config_says_that_load_found_nothing_yet(capsys, started, tmp_path):
    code, out, _ = run(["train", *RUN, "--load", str(tmp_path), "--save", str(tmp_path), "--print-config"], capsys)
    (line,) = (line for line in out.splitlines() if line.startswith("load ="))
    assert code == 0 and line.startswith('load = ""') and line.endswith("holds no checkpoint yet")


def test_verify_shows_options_and_the_real_vocabulary(capsys, started, monkeypatch):
    found = []
    monkeypatch.setattr("isotron.train.selfcheck.main", lambda config, **rest: found.append(config) or 0)
    model = str(ROOT / "assets/demo_tokenizer/tokenizer.json")
    assert run(["verify", *SMALL, "--tokenizer-model", model], capsys)[0] == 0
    assert found[-1].model.vocab_size > 1000
    assert run(["verify", *SMALL], capsys)[0] == 0 and found[-1].model.vocab_size == 0
    from isotron.train.selfcheck import report, scaled_case

    lines = "\n".join(report(found[-1], scaled_case(found[-1]), [], {}, True))
    for line in (
        "schedule             1f1b -> 1f1b",
        "zero                 0 -> 0",
        "vocab_size           unknown -> 131",
        "microbatches         unknown -> 3",
        ", 5 steps, 3 microbatches",
    ):
        assert line in lines, lines
    assert "num_key_value_heads  4 ->" in lines and "head_dim             16 ->" in lines


def test_verify_keeps_the_optimizer_what_is_frozen_and_the_split(capsys, started, monkeypatch):
    found = []
    monkeypatch.setattr("isotron.train.selfcheck.main", lambda config, **rest: found.append(config) or 0)
    from isotron.train.selfcheck import report, scaled_case

    asked = ["--pp", "4", "--cp", "4", "--layers-per-stage", "0,3,1,4", "--num-layers", "8", "--optimizer", "muon"]
    asked += ["--freeze", "embed.*", "layers.7.*", "--param-groups", "layers.0*norm.weight:wd_mult=0"]
    asked += ["--exp-avg-dtype", "bfloat16", "--micro-batch-size", "4", "--global-batch-size", "8"]
    assert run(["verify", *SMALL, *asked], capsys)[0] == 0
    case = scaled_case(found[-1])
    assert case.layout.layers_per_stage == (0, 2) and case.model.num_layers == 2
    assert case.optim.optimizer == "muon" and case.optim.param_groups == found[-1].optim.param_groups
    assert case.frozen == case.optim.freeze == ("embed.*",)  # there is no block 7
    lines = report(found[-1], case, [], {}, True)
    for line in ("cp 4 -> 2", "microbatches 2 -> 2", "optimizer muon -> muon", "freeze embed.*, layers.7.* -> embed.*",
                 "exp_avg_dtype bfloat16 -> float32", "layers_per_stage (0, 3, 1, 4) -> (0, 2)"):  # fmt: skip
        assert line in [" ".join(text.split()) for text in lines], lines
    even = replace(found[-1], layout=replace(found[-1].layout, layers_per_stage=(2, 2, 2, 2)))
    assert scaled_case(even).layout.layers_per_stage == (2, 2)
    for counts, small in (((0.5, 3.5, 0, 4), (0.5, 2.5)), ((3.5, 0, 0.5, 4), (1.5, 2.5)), ((2, 2, 3, 1), (2, 1))):
        cut = replace(found[-1], layout=replace(found[-1].layout, layers_per_stage=counts))
        assert scaled_case(cut).layout.layers_per_stage == small
    lost = replace(found[-1], optim=replace(found[-1].optim, freeze=("nosuch",)))
    with pytest.raises(Refused, match="--freeze nosuch"):
        scaled_case(lost)


def test_notes_name_what_has_no_effect(capsys, started):
    err = run(["train", *RUN, "--transformer-impl", "local", "--sequence-parallel"], capsys)[2]
    assert (
        "note: --transformer-impl local: no effect" in err and "note: --sequence-parallel: no effect with --tp 1" in err
    )


def test_commands_of_the_documentation(tmp_path, monkeypatch, capsys, started):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(toml|bash)\n(.*?)```", text, re.S)[:1])
    Path("run.toml").write_text(blocks["toml"])
    commands = [c for b in re.findall(r"```bash\n(.*?)```", text, re.S) for c in b.splitlines()]
    assert len(commands) == 3
    for command in commands:
        code, out, err = run(shlex.split(command)[1:], capsys)
        assert code == 0 and "seq_length" in out, err


def launch(line, glued=False, **env):
    """Run a launch line of the documentation in the current directory, as written or pasted on one line."""
    program, *words = line.split()
    words[0] = str(ROOT / words[0])
    if glued:
        words = [words[0], *(f" {w}" if w.startswith("--") else w for w in words[1:])]
    python = {"PYTHON": sys.executable, **env}
    program = sys.executable if program == "python" else program
    return subprocess.run([program, *words], capture_output=True, text=True, env={**os.environ, **python})


@pytest.mark.parametrize("glued", [False, True])
def test_preprocess_line(workspace, glued):
    line = (
        "python tools/preprocess_data.py --input my_corpus.json --output-prefix my_gpt --vocab-file vocab.json "
        "--merge-file merges.txt --tokenizer-type GPT2BPETokenizer --append-eod"
    )
    result = launch(line, glued)
    assert result.returncode == 0, result.stderr
    assert "26 documents" in result.stdout and (workspace / "my_gpt_text_document.bin").stat().st_size > 0


@pytest.mark.parametrize("glued", [False, True])
def test_pretrain_line(workspace, glued):
    result = launch(f"bash examples/pretrain_gpt.sh {PRETRAIN} --device cpu --print-config --json", glued)
    assert result.returncode == 0, result.stderr
    config = from_dict(json.loads(result.stdout)["config"])
    assert config.model.family == "gpt" and config.model.max_position_embeddings == 2048 and config.layout.world == 4
    assert config.train.train_iters == 500000 and config.checkpoint.load == ""
    assert "train_iters 500000" in result.stderr and "a new run starts" in result.stderr


def test_pretrain_line_with_smaller_sizes(workspace, monkeypatch, capsys, started):
    smaller = [*SMALL, "--global-batch-size", "4", "--train-iters", "3"]
    words = ["train", "--defaults", "megatron", *PRETRAIN.split(), *smaller]
    assert run(words, capsys)[0] == 0
    config = started[0][2][0]
    assert (config.model.hidden_size, config.train.train_iters, config.train.global_batch_size) == (64, 3, 4)
    assert config.data.data_path == ("my_gpt",) and started[0][1] == 4


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("bash examples/finetune_gpt.sh --finetune --load-checkpoint ./pretrain_checkpoints --data-path "
         "./finetune_data --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
         "--load ./pretrain_checkpoints"),
        ("python tools/checkpoint/convert.py --model-type GPT --loader llama_mistral --saver core --load-dir ./a "
         "--save-dir ./b --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2",
         "neither a checkpoint nor a Hugging Face directory"),
        ("bash examples/inference/run_text_generation.sh --load-checkpoint ./checkpoints "
         "--tensor-model-parallel-size 2 --pipeline-parallel-size 2", "--load ./checkpoints"),
    ],
)  # fmt: skip
def test_lines_that_cannot_run_say_what_to_do(workspace, line, part):
    result = launch(line)
    assert result.returncode == 2 and part in result.stderr
    three_lines(result.stderr)


def test_blank_lines_of_stdin_are_no_prompts(monkeypatch):
    from io import StringIO

    from isotron.commands.generate import _from_stdin

    monkeypatch.setattr(sys, "stdin", StringIO("a b\n\n  \nc\n"))
    assert _from_stdin() == ("a b", "c")


def test_a_letter_that_the_output_cannot_spell_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    cli._open_standard_streams()
    print("caf\u00e9", flush=True)
    assert written.getvalue() == b"caf\\xe9\n"
