"""Megatron's checkpoints read: numbers against its own logits, hostile and broken files, the confined process.

megatron-core 0.16.1 wrote the fixtures at TP 2 x PP 2 (tests/megatron_oracle.py), with the logits it computed.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isotron.commands import convert as command
from isotron.commands.convert import run_meta
from isotron.config.resume import find_checkpoint
from isotron.config.schema import from_dict
from isotron.core.checkpoint.load import Source
from isotron.core.checkpoint.weights import load_masters, load_weights
from isotron.core.errors import Refused
from isotron.core.layout import whole
from isotron.core.mesh import Mesh
from isotron.core.optim.build import make_optimizer
from isotron.core.optim.restore import load_slots
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.hub.compare import _batch
from isotron.hub.convert import convert
from isotron.hub.megatron.args import read_config, write_args
from isotron.hub.megatron.ask import is_megatron, scan, step_directory
from isotron.hub.megatron.source import MegatronSource
from isotron.hub.opened import open_model
from tests.hf_twins import save

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
TRAINED = FIXTURES / "megatron-trained"


def our_logits(path: Path) -> torch.Tensor:
    """Of the tokens that tests/megatron_oracle.py gives its model."""
    opened = open_model(path)
    model = ParallelModel(opened.model, Layout(dp=1), Mesh(), torch.float32, torch.device("cpu"), 0)
    load_weights(model, opened.source)
    (stage,) = model.stages.values()
    module: Any = stage.module.eval()
    with torch.no_grad():
        _, found = module.logits(_batch(torch.arange(40)[None] * 7 % 131), {})
    return found[..., :131]


@pytest.mark.parametrize("name", ["llama", "llama/legacy", "gpt"])
def test_logits_are_megatrons(name: str) -> None:
    directory = FIXTURES / f"megatron-{name}"
    wanted = torch.from_numpy(np.load(FIXTURES / f"megatron-{name.split('/')[0]}" / "logits.npy"))[..., :131]
    assert (our_logits(directory) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    if sys.platform.startswith("linux"):
        assert "limits" in scan(step_directory(directory).resolve()).guards


def test_converted_to_ours_and_to_hugging_face(tmp_path: Path) -> None:
    for to in ("isotron", "hf"):
        done = convert(FIXTURES / "megatron-llama", tmp_path / to, to, run_meta)
        assert done.family == "llama" and done.tensors > 10
        assert torch.equal(our_logits(tmp_path / to), our_logits(FIXTURES / "megatron-llama"))


def broken(tmp_path: Path, **files: Any) -> Path:
    """A copy of a fixture with some files replaced."""
    shutil.copytree(FIXTURES / "megatron-llama" / "iter_0000005", tmp_path / "m")
    for name, content in files.items():
        (tmp_path / "m" / name.replace("_", ".", 1)).write_bytes(content)
    return tmp_path / "m"


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_written_as_megatrons_and_read_again(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = FIXTURES / f"megatron-{name}"
    words = ["--loader", "core", "--saver", "core", "--load-dir", str(source), "--save-dir", str(tmp_path / "m"),
             "--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]  # fmt: skip
    assert command.run(words) == 0 and "read again and equal" in capsys.readouterr().out
    assert torch.equal(our_logits(tmp_path / "m"), our_logits(source))
    assert open_model(tmp_path / "m").model == open_model(source).model
    scanned = MegatronSource(tmp_path / "m").scanned
    args = scanned.args
    sizes = args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"], args["padded_vocab_size"]
    assert sizes == (2, 2, 256)
    part = zipfile.ZipFile(tmp_path / "m" / "release" / "common.pt")
    assert part.testzip() is None
    assert args["num_layers"] == 2 and scanned.updates == 0


def equal(a: MegatronSource, b: MegatronSource) -> bool:
    """Bit by bit."""
    pairs = []
    for name in a.names():
        for source in (a, b):
            dtype, shape = source.info(name)
            pairs.append(torch.full(shape, torch.nan, dtype=dtype))
            source.read(name, whole(shape), pairs[-1])
    return a.names() == b.names() and all(map(torch.equal, pairs[::2], pairs[1::2]))


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("llama", [(2, 2), (2, 1)]),
        ("gpt", [(1, 2), (1, 1)]),
        pytest.param("llama", [(1, 1), (1, 2), (2, 2)], marks=pytest.mark.slow),
        pytest.param("gpt", [(2, 2), (2, 1), (1, 2)], marks=pytest.mark.slow),
    ],
)
def test_rewritten_for_other_layouts(
    name: str, layouts: list[tuple[int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One result is the source of the next; a file for each rank, with an equal part of what is cut."""
    first = MegatronSource(FIXTURES / f"megatron-{name}")
    at, cut = FIXTURES / f"megatron-{name}", ["--ckpt-format", "torch"]
    for tp, pp in layouts:
        result = tmp_path / f"{tp}{pp}"
        local = ["--saver-transformer-impl", "local"] if tp == pp else []
        assert command.run([str(at), str(result), "--tp", str(tp), "--pp", str(pp), *cut, *local]) == 0
        assert len(list(result.glob("release/mp_rank_*/model_optim_rng.pt"))) == tp * pp
        found = MegatronSource(result)
        assert found.scanned.format == "torch" and found.model == first.model and equal(found, first)
        args = found.scanned.args
        assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (tp, pp)
        at, cut = result, []  # its own format is kept
    assert command.run([str(at), str(tmp_path / "dist"), "--ckpt-format", "torch_dist"]) == 0
    assert equal(MegatronSource(tmp_path / "dist"), first)
    assert "read again and equal" in capsys.readouterr().out


def test_layouts_that_cannot_be_cut_and_sources_without_one(tmp_path: Path) -> None:
    source = str(FIXTURES / "megatron-llama")
    with pytest.raises(Refused) as refused:
        command.run([source, str(tmp_path / "m"), "--tp", "7", "--pp", "3", "--ckpt-format", "torch"])
    assert "7 does not divide num_query_groups 2" in str(refused.value) and "equal stages" in str(refused.value)
    convert(source, tmp_path / "ours", "isotron", run_meta)
    with pytest.raises(Refused, match="without --to"):
        command.run([str(tmp_path / "ours"), str(tmp_path / "m"), "--tp", "2"])


LINE = (
    "tools/checkpoint/convert.py --model-type GPT --loader llama_mistral --saver core "
    "--load-dir ./huggingface_llama_8b --save-dir ./megatron_llama_8b --target-tensor-parallel-size 2 "
    "--target-pipeline-parallel-size 2"
)


def test_the_line_of_megatrons_users(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save("llama-tied", tmp_path / "huggingface_llama_8b")
    words = [sys.executable, *f"{ROOT}/{LINE}".split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = tmp_path / "megatron_llama_8b"
    assert (found / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert torch.equal(our_logits(found), our_logits(tmp_path / "huggingface_llama_8b"))
    back = convert(found, tmp_path / "hf", "hf", run_meta)
    assert back.family == "llama" and torch.equal(our_logits(tmp_path / "hf"), our_logits(found))


@pytest.mark.slow
def test_a_run_begins_with_megatrons_weights_or_goes_on(tmp_path: Path) -> None:
    convert(TRAINED, tmp_path / "converted", "isotron", run_meta)
    line = "-m isotron train --mock-data --seq-length 40 --device cpu --tp 2 --eval-iters 0 --save"
    said = {}
    for load in (TRAINED, tmp_path / "converted"):
        words = [*line.split(), str(tmp_path / f"from_{load.name}"), "--load", str(load), "--train-iters", "5"]
        surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said[load.name] = done.stdout
    assert "begun with the weights of" in said[TRAINED.name]
    assert "its optimizer's state is not taken (masters and moments): isotron convert" in said[TRAINED.name]
    assert "at step 3, 3 samples consumed" in said["converted"]


def megatron_core_python() -> str:
    """A Python that has megatron-core: the one that MEGATRON_CORE_PYTHON names, or this one; empty if there is none."""
    named = os.environ.get("MEGATRON_CORE_PYTHON", "")
    if named:
        return named if Path(named).is_file() else ""
    try:
        return sys.executable if find_spec("megatron.core") is not None else ""
    except ModuleNotFoundError:
        return ""


@pytest.mark.slow
@pytest.mark.skipif(
    not megatron_core_python(),
    reason="no megatron-core to load with: install it here, or name a Python that has it in MEGATRON_CORE_PYTHON",
)
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_megatron_core_loads_what_was_written(name: str, form: str, tmp_path: Path) -> None:
    """`torch_dist` on one process, and `torch` on the four that it was cut for."""
    tp, pp = (2, 2) if form == "torch" else (2, 1)
    options = {"ckpt_format": form, "saver_transformer_impl": "local"}
    convert(FIXTURES / f"megatron-{name}", tmp_path / "m", "megatron", run_meta, tp=tp, pp=pp, megatron=options)
    program = [megatron_core_python(), "-W", "ignore", str(ROOT / "tests" / "megatron_oracle.py"), "read"]
    surroundings = {**os.environ, "MEETING": str(tmp_path / "meeting"), "GLOO_SOCKET_IFNAME": "lo"}
    if form == "torch":
        surroundings |= {"TP": "2", "PP": "2", "WORLD_SIZE": "4"}
    started = [
        subprocess.Popen([*program, str(tmp_path / "m")], env={**surroundings, "RANK": str(r)}, stderr=subprocess.PIPE)
        for r in range(int(surroundings.get("WORLD_SIZE", 1)))
    ]
    for process in started:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said[-2000:]
    found, wanted = (np.load(d / "logits.npy")[..., :131] for d in (tmp_path / "m", FIXTURES / f"megatron-{name}"))
    assert abs(found - wanted).max() < 1e-5 * abs(wanted).max()


def test_what_megatron_cannot_be_told_is_refused(tmp_path: Path) -> None:
    from isotron.core.models.llama_config import LlamaConfig

    with pytest.raises(Refused, match="stretched by yarn"):
        write_args(LlamaConfig(rope_scaling="yarn"), "float32", 1, 1)


def test_megatrons_optimizer_goes_on(tmp_path: Path) -> None:
    """Three steps were Megatron's, in bfloat16 with float32 masters; two more here lose as two more there."""
    done = convert(TRAINED, tmp_path / "run", "isotron", run_meta, optimizer_state="need")
    assert not any("stayed behind" in note for note in done.notes)
    found = find_checkpoint(str(tmp_path / "run"), "")
    assert found.step == 3 and not found.weights_only and found.config is not None
    given = from_dict(found.config)
    assert (given.optim.adam_beta1, given.schedule.lr, given.train.train_iters, given.data.split) == (
        0.8,
        0.02,
        5,
        "90,5,5",
    )
    source = Source(found.path)
    meta = source.manifest.meta
    assert (meta["updates"], meta["consumed_samples"], meta["segments"]) == (3, 3, [5])
    model = ParallelModel(given.model, Layout(dp=1), Mesh(), torch.float32, torch.device("cpu"), 0)
    load_weights(model, source)
    load_masters(model, source)
    optimizer = make_optimizer(model, given.optim)
    load_slots(optimizer, source)
    optimizer.updates = meta["updates"]
    tokens = torch.arange(40)[None] * 7 % 131
    batch = replace(_batch(tokens), labels=tokens.roll(-1, 1))
    losses = []
    for _ in range(2):
        terms = model.forward_backward([batch], 1 / 40)
        losses.append(float(terms["loss"]) / 40)
        optimizer.step(given.schedule.lr, given.schedule.weight_decay, 1.0)
    wanted = np.load(TRAINED / "losses.npy")[3:]
    assert abs(np.array(losses) - wanted).max() < 1e-5 * wanted.max()


def test_optimizer_states_that_stay_behind(tmp_path: Path) -> None:
    for source, part in ((FIXTURES / "megatron-llama", "there is none in it"), (tmp_path / "buckets", "flat buckets")):
        if part == "flat buckets":
            shutil.copytree(TRAINED / "iter_0000003", source)
            index = (source / ".metadata").read_bytes()
            # names of the same length, as the distributed optimizer's begin
            index = index.replace(b"optimizer.state.exp_avg", b"optimizer.distributed.x")
            (source / ".metadata").write_bytes(index.replace(b"optimizer.state.fp32_p", b"optimizer.distributed."))
        with pytest.raises(Refused, match=part):
            command.run([str(source), str(tmp_path / "x"), "--to", "isotron", "--optimizer-state", "need"])
    with pytest.raises(Refused, match="--to hf has no place for it"):
        command.run([str(TRAINED), str(tmp_path / "x"), "--to", "hf", "--optimizer-state", "need"])
    done = convert(TRAINED, tmp_path / "weights", "isotron", run_meta, optimizer_state="drop")
    assert find_checkpoint(str(tmp_path / "weights"), "").weights_only
    assert "stayed behind: it was not asked for" in " ".join(done.notes)


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def archive(value: Any) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as z:
        z.writestr("archive/data.pkl", pickle.dumps(value, 2))
    return data.getvalue()


def test_a_pickle_that_names_something_else_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = broken(tmp_path, common_pt=archive({"args": Hostile()}))
    with pytest.raises(Refused, match=r"(posix|nt).system, which no checkpoint needs"):
        MegatronSource(where)
    (where / ".metadata").write_bytes(pickle.dumps({"state": Hostile()}))
    with pytest.raises(Refused, match="nothing of it was run"):
        MegatronSource(where)
    assert not (tmp_path / "pwned").exists()


def test_broken_checkpoints(tmp_path: Path) -> None:
    where = broken(tmp_path)
    file = next(where.glob("*.distcp"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refused, match="cannot be read"):
        MegatronSource(where)
    file.write_bytes(whole)
    (where / "common.pt").write_bytes(archive({"iteration": 5}))
    with pytest.raises(Refused, match="keeps no arguments of the run"):
        MegatronSource(where)
    args = dict(vars(Namespace(**scan(step_directory(FIXTURES / "megatron-llama").resolve()).args)))
    (where / "common.pt").write_bytes(archive({"args": Namespace(**{**args, "num_layers": 3, "ffn_hidden_size": 20})}))
    with pytest.raises(Refused) as refused:
        MegatronSource(where)
    assert "6 tensors are missing: decoder.layers.2" in str(refused.value)
    assert "the arguments say [40, 16]" in str(refused.value)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert is_megatron(tmp_path)
    with pytest.raises(Refused, match="no checkpoint in iter_0000007"):
        MegatronSource(tmp_path)


def test_arguments_without_counterpart_are_refused_at_once() -> None:
    args = scan(step_directory(FIXTURES / "megatron-llama").resolve()).args
    strange = {**args, "num_experts": 8, "rotary_interleaved": True, "position_embedding_type": "mrope"}
    with pytest.raises(Refused) as refused:
        read_config(strange, "it")
    for part in ("num_experts is 8", "rotary_interleaved is True", "position_embedding_type is 'mrope'"):
        assert part in str(refused.value)
    with pytest.raises(Refused, match="the blocks of no family"):
        read_config({**args, "normalization": "LayerNorm"}, "it")
    biased = read_config({**args, "add_bias_linear": True, "add_qkv_bias": True}, "it")
    assert biased.attention_bias and biased.mlp_bias
    assert read_config(write_args(biased, "float32", 1, 1), "it") == biased
    with pytest.raises(Refused, match="in attention or in the MLP alone"):
        write_args(replace(biased, mlp_bias=False), "float32", 1, 1)


PROBE = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from isotron.hub.megatron.confine import confine
found = confine()
def tried(what):
    try:
        what()
    except OSError as error:
        return type(error).__name__
    return "done"
print(found, tried(lambda: open(sys.argv[2], "w").write("x")), tried(lambda: socket.socket()),
      tried(os.fork), tried(lambda: os.unlink(sys.argv[1] + "/README.md")),
      tried(lambda: open(sys.argv[1] + "/README.md").read()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the filter of system calls is Linux's")
def test_a_confined_process_can_only_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("text")
    (tmp_path / "isotron").symlink_to(ROOT / "isotron")
    command = [sys.executable, "-I", "-c", PROBE, str(tmp_path), str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if "calls" in done.stdout:  # the machine has such filters
        assert done.stdout.split("] ")[1].split() == ["PermissionError"] * 4 + ["done"]
    assert (tmp_path / "README.md").read_text() == "text" and not (tmp_path / "new").exists()
