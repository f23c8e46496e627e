"""Commands on a Hugging Face directory end to end: train in a layout, generate, convert back, fine-tune from texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isotron.commands.convert import run_meta
from isotron.commands.finetune import completed
from isotron.core.errors import Refused
from isotron.hub.convert import convert
from isotron.hub.folder import open_folder
from tests.hf_twins import save

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
FINETUNE = (
    "bash examples/finetune_gpt.sh --finetune --load-checkpoint ./pretrain_checkpoints --data-path ./finetune_data "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)


def launch(directory: Path, line: str) -> subprocess.CompletedProcess[str]:
    program, *words = line.split()
    words = [str(ROOT / words[0]), *words[1:]] if "/" in words[0] else words
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable if program == "python" else program, *words]
    result = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def tokenizer(directory: Path) -> None:
    """One token per character, <s> before a text, and two tokens that end one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, "▁": 3}
    for number in range(33, 123):
        vocab.setdefault(chr(number), len(vocab))
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 0)])
    made.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": "{{ messages }}"}))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 119]}))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    save("qwen3", directory / "hf")
    tokenizer(directory / "hf")
    (directory / "finetune_data").mkdir()
    texts = (json.dumps({"text": f"{i} green bottles hanging on the wall"}) + "\n" for i in range(60))
    (directory / "finetune_data" / "songs.jsonl").write_text("".join(texts))
    return directory


def answer(directory: Path, words: str) -> dict[str, Any]:
    line = f"python -m isotron generate --device cpu --temperature 0 --json --max-new-tokens 12 {words}"
    (result,) = json.loads(launch(directory, line).stdout)["results"]
    return dict(result)


SMALL = "--seq-length 16 --device cpu --eval-iters 0 --mock-data --global-batch-size 2"
TRAIN = f"python -m isotron train --tp 2 --pp 2 --train-iters 1 --lr 0 {SMALL}"


def test_from_hugging_face_through_training_and_fine_tuning_back(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    begun = launch(workspace, f"{TRAIN} --load hf --save pretrain_checkpoints").stdout
    assert "begun with the weights of hf" in begun
    convert("pretrain_checkpoints", "same", "hf", run_meta)
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(workspace / d) for d in ("hf", "same"))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))  # at a rate of 0
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    assert all((workspace / "hf" / n).read_bytes() == (workspace / "same" / n).read_bytes() for n in names)
    assert open_folder(workspace / "hf").model == open_folder(workspace / "same").model
    found = answer(workspace, "--prompt green --load same --tp 2 --pp 2")
    assert found["prompt_tokens"][0] == 0
    ids = torch.tensor([found["prompt_tokens"]])
    greedy = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [1, 119], "pad_token_id": 0}
    theirs = one.eval().generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    assert theirs[0, ids.shape[1] :].tolist() == found["tokens"]
    tuned = launch(workspace, f"{FINETUNE} --device cpu --save tuned --eval-iters 0 --train-iters 2")
    assert "begun with the weights of pretrain_checkpoints" in tuned.stdout
    lines = [json.loads(x) for x in (workspace / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == [1, 2]
    convert("tuned", "tuned_hf", "hf", run_meta)
    assert json.loads((workspace / "tuned_hf" / "tokenizer_config.json").read_text())["chat_template"]


@pytest.mark.slow
def test_a_converted_model_begins_a_run_and_answers_the_same(workspace: Path) -> None:
    line = (
        "python tools/checkpoint/convert.py --model-type GPT --loader llama_mistral --saver isotron --load-dir ./hf "
        "--save-dir ./converted --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"
    )
    launch(workspace, line)
    begun = launch(workspace, f"{TRAIN} --load converted --save again")
    assert "begun with the weights of converted" in begun.stdout
    ours, theirs = (answer(workspace, f"--prompt green {w}") for w in ("--load converted --tp 2", "--load hf"))
    assert ours["tokens"] == theirs["tokens"]


def test_what_fine_tuning_fills_in(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    said: list[str] = []
    words = completed(
        ["--load", "hf", "--data-path", "finetune_data", "--seq-length", "32", "--device", "cpu"], said.append
    )
    assert words[:3] == ["--finetune", "--lr", "2e-5"] and int(words[-1]) > 10 and "one pass over" in said[-1]
    prefix = words[words.index("--data-path", 6) + 1]
    assert Path(prefix + ".idx").is_file()
    assert words == completed(words[3:9], lambda line: None) or "tokenized" in prefix
    for line, part in (
        (["--data-path", "x"], "--load not given"),
        (["--load", "hf", "--data-path", "hf"], "neither .bin/.idx pairs nor JSON lines"),
        (
            ["--load", "hf", "--data-path", "0.5", "finetune_data", "0.5", "finetune_data"],
            "a weight belongs to a prefix",
        ),
    ):
        if part.startswith("neither"):
            (workspace / "empty").mkdir()
            line = [*line[:-1], "empty"]
        with pytest.raises(Refused, match=part):
            completed(line, said.append)
