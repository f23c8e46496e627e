"""Conversion there and back: tensors, configs, tied and untied heads, shards, resumption, refusals, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isotron.commands.convert import run_meta
from isotron.config.schema import MODELS
from isotron.core.errors import Refused
from isotron.core.layout import Box
from isotron.hub import targets
from isotron.hub.convert import convert
from isotron.hub.families import FAMILIES, spelling_of
from isotron.hub.folder import INDEX, open_folder, stored_tensors
from isotron.hub.reader import HFSource
from tests.hf_twins import TWINS, save

transformers = pytest.importorskip("transformers")

SPELLINGS = {"rope_scaling", "rope_theta", "rope_parameters", "torch_dtype", "dtype", "partial_rotary_factor",
             "transformers_version"}  # fmt: skip


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = {stored.file for stored in stored_tensors(directory).values()}
    return {name: t for file in files for name, t in load_file(file).items()}


def same_tensors(a: Path, b: Path) -> None:
    one, two = tensors(a), tensors(b)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n].view(torch.uint8), two[n].view(torch.uint8)) for n in one)


def without_type(given: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters without the older spelling of their kind."""
    return {k: without_type(v) if isinstance(v, dict) else v for k, v in given.items() if k != "type"}


def there_and_back(source: Path, scratch: Path, **options: Any) -> Path:
    convert(source, scratch / "ours", "isotron", run_meta, **options)
    convert(scratch / "ours", scratch / "theirs", "hf", run_meta, **options)
    return scratch / "theirs"


BOTH = [(name, (torch.float32, torch.bfloat16)[i % 2]) for i, name in enumerate(TWINS)]
REST = [pytest.param(name, dtype, marks=pytest.mark.slow) for name in TWINS for dtype in (torch.float32, torch.bfloat16)
        if (name, dtype) not in BOTH]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [*BOTH, *REST])
def test_there_and_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(name, tmp_path / "source", dtype)
    back = there_and_back(tmp_path / "source", tmp_path)
    same_tensors(tmp_path / "source", back)
    old, new = (json.loads((d / "config.json").read_text()) for d in (tmp_path / "source", back))
    assert {k: v for k, v in old.items() if k != "rope_parameters"}.items() <= new.items()
    assert new["torch_dtype"] == new["dtype"] == str(dtype).removeprefix("torch.")
    assert open_folder(tmp_path / "source").model == open_folder(back).model
    theirs = [transformers.AutoConfig.from_pretrained(d).to_dict() for d in (tmp_path / "source", back)]
    for config in theirs:
        config["rope_parameters"] = without_type(config.get("rope_parameters") or {})
    assert {k: v for k, v in theirs[1].items() if k in theirs[0] and k != "_name_or_path"} == {
        k: v for k, v in theirs[0].items() if k != "_name_or_path"
    }


@pytest.mark.parametrize("name", TWINS)
def test_a_config_without_origin_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """Old and new spellings alone, as a model trained here has them, and the older one alone."""
    twin = save(name, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ours", "isotron", run_meta)
    (step,) = (tmp_path / "ours").glob("step_*")
    manifest = json.loads((step / "manifest.json").read_text())
    for file in [f for f in manifest["files"] if f.startswith("hf/")]:
        (step / file).unlink()
        del manifest["files"][file]
    manifest["format_version"] = 1  # which has no hash of itself
    (step / "manifest.json").write_text(json.dumps(manifest))
    convert(tmp_path / "ours", tmp_path / "both", "hf", run_meta)
    tokens = torch.arange(200)[None] % 131
    wanted = twin(tokens).logits
    fields = json.loads((tmp_path / "both" / "config.json").read_text())
    for drop in (None, "rope_parameters"):
        fields.pop(drop, None)
        (tmp_path / "both" / "config.json").write_text(json.dumps(fields))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "both", attn_implementation="eager").eval()
        assert type(model) is type(twin) and torch.equal(model(tokens).logits, wanted)


def test_several_files_and_another_dtype(tmp_path: Path) -> None:
    twin = save("llama", tmp_path / "source", max_shard_size="40KB")
    assert (tmp_path / "source" / INDEX).is_file()
    back = there_and_back(tmp_path / "source", tmp_path, file_bytes=50_000)
    same_tensors(tmp_path / "source", back)
    index = json.loads((back / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in twin.parameters())
    assert len(set(index["weight_map"].values())) > 3
    loaded = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert all(torch.equal(p, q) for p, q in zip(twin.parameters(), loaded.parameters(), strict=True))
    convert(back, tmp_path / "narrow", "hf", run_meta, dtype="bfloat16")
    assert {t.dtype for t in tensors(tmp_path / "narrow").values()} == {torch.bfloat16}


def edit(directory: Path, config: dict[str, Any], change: Any = None) -> Path:
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | config))
    if change is not None:
        found = load_file(directory / "model.safetensors")
        change(found)
        save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_everything_that_is_not_understood_is_said_at_once(tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    whole = json.loads((tmp_path / "m" / "config.json").read_text())
    strange = {"hidden_act": "relu", "brand_new": 3, "quantization_config": {"bits": 4}}
    with pytest.raises(Refused) as refused:
        open_folder(edit(tmp_path / "m", strange))
    for part in ("hidden_act is 'relu'", "brand_new = 3", "quantization_config"):
        assert part in str(refused.value)
    with pytest.raises(Refused, match="rotary positions of type 'spiral'"):
        open_folder(edit(tmp_path / "m", {**dict.fromkeys(strange), "rope_parameters": {"rope_type": "spiral"}}))
    for unfit, said in (
        (
            {"max_position_embeddings": 0, "num_hidden_layers": -1},
            "max_position_embeddings is 0, .*num_hidden_layers is",
        ),
        ({"num_key_value_heads": 3}, "8 query heads are no multiple of 3"),
        ({"hidden_size": 66, "head_dim": None}, "hidden_size 66 is not a multiple of 8"),
    ):
        values = dict.fromkeys(strange) | {"rope_parameters": None} | unfit
        with pytest.raises(Refused, match=said):
            open_folder(edit(tmp_path / "m", values))
        (tmp_path / "m" / "config.json").write_text(json.dumps(whole))
    with pytest.raises(Refused, match="model_type 'bloom'"):
        open_folder(edit(tmp_path / "m", {"model_type": "bloom"}))


def test_patterns_of_windows_and_rotations_that_isotron_has_not(tmp_path: Path) -> None:
    save("gemma3", tmp_path / "m")
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(Refused, match="full_attention in every n-th of 3 blocks"):
        open_folder(edit(tmp_path / "m", {"layer_types": kinds}))
    rope = {"full_attention": {"rope_theta": 5e4}, "sliding_attention": {"rope_type": "yarn"}, "other": {}}
    with pytest.raises(Refused) as refused:
        open_folder(edit(tmp_path / "m", {"layer_types": None, "rope_parameters": rope, "attn_logit_softcapping": 9.0}))
    for part in ("isotron has no stretch there", "full_attention and sliding_attention", "attn_logit_softcapping"):
        assert part in str(refused.value)
    # as it was published: no list of kinds, no flag of a tie, older names
    old = {"rope_parameters": None, "rope_theta": 5e4, "rope_local_base_freq": 500, "sliding_window_pattern": 3,
           "attn_logit_softcapping": None, "tie_word_embeddings": None, "cache_implementation": "hybrid"}  # fmt: skip
    model = open_folder(edit(tmp_path / "m", old)).model
    assert (model.rope_theta, model.rope_local_theta, model.window_attn_skip_freq) == (5e4, 500.0, 3)
    assert model.tie_embeddings and [model.window(i) for i in range(3)] == [17, 17, 0]


def test_tensors_that_do_not_fit_are_said_at_once(tmp_path: Path) -> None:
    save("llama", tmp_path / "m")

    def change(found: dict[str, torch.Tensor]) -> None:
        del found["model.layers.1.mlp.up_proj.weight"], found["model.norm.weight"]
        found["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
        found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"][:-1].clone()
        found["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)  # old files have it; it is not needed

    with pytest.raises(Refused) as refused:
        HFSource(edit(tmp_path / "m", {}, change))
    text = str(refused.value)
    assert "2 tensors are missing: model.norm.weight, model.layers.1.mlp.up_proj.weight" in text
    assert "no place for 1 tensors: model.layers.9" in text and "[130, 64], the config says [131, 64]" in text


def test_broken_directories(tmp_path: Path) -> None:
    save("llama", tmp_path / "m", max_shard_size="40KB")
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    name = next(n for n in index["weight_map"] if "norm" in n)
    moved = index | {"weight_map": {n: f for n, f in index["weight_map"].items() if n != name}}
    (tmp_path / "m" / INDEX).write_text(json.dumps(moved))
    with pytest.raises(Refused, match=f"{name} is not in the index"):
        HFSource(tmp_path / "m")
    (tmp_path / "m" / INDEX).write_text(json.dumps(index))
    victim = tmp_path / "m" / index["weight_map"][name]
    victim.write_bytes(victim.read_bytes()[:-7])
    with pytest.raises(Refused, match="truncated or damaged"):
        HFSource(tmp_path / "m")
    victim.unlink()
    with pytest.raises(Refused, match="which is not there"):
        HFSource(tmp_path / "m")
    for file in (tmp_path / "m").glob("model*"):
        file.unlink()
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(Refused, match="is a pickle"):
        HFSource(tmp_path / "m")


def test_nothing_is_overwritten_and_nan_is_not_converted(tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("")
    with pytest.raises(Refused, match="nothing is overwritten"):
        convert(tmp_path / "m", tmp_path / "taken", "hf", run_meta)
    with pytest.raises(Refused, match="neither a checkpoint nor a Hugging Face directory"):
        convert(tmp_path / "taken", tmp_path / "b", "hf", run_meta)

    def spoil(found: dict[str, torch.Tensor]) -> None:
        found["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan

    with pytest.raises(Refused, match="layers.1.mlp.down.weight"):
        convert(edit(tmp_path / "m", {}, spoil), tmp_path / "c", "isotron", run_meta)
    assert not (tmp_path / "c").exists()


def test_an_interrupted_conversion_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("qwen3", tmp_path / "m")
    real, written = targets.write_planned, []

    def failing(file: Path, planned: Any) -> Any:
        if len(written) == 2:
            file.write_bytes(b"half")
            raise OSError("the disk went away")
        written.append(file.name)
        return real(file, planned)

    monkeypatch.setattr(targets, "write_planned", failing)
    with pytest.raises(OSError, match="went away"):
        convert(tmp_path / "m", tmp_path / "out", "hf", run_meta, file_bytes=60_000)
    monkeypatch.setattr(targets, "write_planned", real)
    (tmp_path / "out.partial" / written[0]).write_bytes(b"damaged meanwhile")
    done = convert(tmp_path / "m", tmp_path / "out", "hf", run_meta, file_bytes=60_000)
    assert done.reused == 1 and done.files > 3 and not (tmp_path / "out.partial").exists()
    same_tensors(tmp_path / "m", tmp_path / "out")


def test_a_damaged_result_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("gpt2", tmp_path / "m")
    real = targets.write_planned

    def flipping(file: Path, planned: Any) -> Any:
        entry = real(file, planned)
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        return entry

    monkeypatch.setattr(targets, "write_planned", flipping)
    with pytest.raises(Refused, match="read again, 1 tensors are not what was written"):
        convert(tmp_path / "m", tmp_path / "out", "hf", run_meta)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "phi3"])
def test_any_region_can_be_read(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    source = HFSource(tmp_path)
    generator = torch.Generator().manual_seed(1)
    for ours in source.names():
        _, shape = source.info(ours)
        full = torch.empty(shape)
        source.read(ours, Box((0,) * len(shape), shape), full)
        for _ in range(4):
            ends = [sorted(torch.randint(0, n + 1, (2,), generator=generator).tolist()) for n in shape]
            box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
            for dtype in (torch.float32, torch.bfloat16):
                part = torch.empty(box.shape, dtype=dtype)
                source.read(ours, box, part)
                assert torch.equal(part, full[box.slices()].to(dtype))


MEMORY = """
import sys, torch
from pathlib import Path
from isotron.hub.convert import convert
from isotron.hub.live import from_hf
from isotron.commands.convert import run_meta
torch.ones(4, 4) @ torch.ones(4, 4)
def peak():  # of this program; what getrusage says includes the program that started it
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1])
before = peak()
d = Path(sys.argv[1])
convert(d / "source", d / "ours", "isotron", run_meta)
convert(d / "ours", d / "back", "hf", run_meta)
convert(d / "ours", d / "megatron", "megatron", run_meta, tp=2)
convert(d / "megatron", d / "again", "isotron", run_meta)
print((peak() - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_a_conversion(tmp_path: Path) -> None:
    """A model of about 400 MB, whose largest tensor has 33 MB."""
    from isotron.core.models.llama_config import LlamaConfig
    from isotron.hub.families import spelling_of

    cfg = LlamaConfig(20, 1024, 8, 8, 0, 4096, 8000, 256)
    fields = {"model_type": "llama", "torch_dtype": "float32", **spelling_of("llama").write_config(cfg)}
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(fields))
    table, found = cfg.layout(cfg.vocab_size), {}
    for mapped in spelling_of("llama").tensors(cfg):
        for name, rows in mapped.theirs().items():
            found[name] = torch.full((rows, *table.rule(mapped.ours).shape[1:]), 0.5, dtype=torch.bfloat16)
    save_file(found, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "source" / "model.safetensors").stat().st_size > 380e6
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 1 < float(done.stdout) < 150, done.stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["a"], ["it takes one source and one result", "--to not given"]),
        (["a", "b", "--to", "megatron", "--tp", "0"], ["a size is 1 or more", "--tp 1"]),
        (["a", "b", "--saver", "llava"], ["the savers are"]),
        (["a", "b", "--to", "hf", "--loader", "gguf"], ["there is no such loader"]),
    ],
)
def test_requests_that_cannot_be(words: list[str], parts: list[str]) -> None:
    from isotron.commands import convert as command

    with pytest.raises(Refused) as refused:
        command.run(words)
    assert all(part in str(refused.value) for part in parts) and refused.value.exit_code == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_are_none_are_refused_by_name(family: str) -> None:
    """Under every name that a family has for its width, heads, layers, vocabulary and positions."""
    names = ("hidden_size n_embd d_model", "num_hidden_layers n_layer num_layers", "intermediate_size n_inner d_ff",
             "num_attention_heads n_head num_heads", "vocab_size", "max_position_embeddings n_positions")  # fmt: skip
    for alike in names:
        said = []
        for name in alike.split():
            for bad in (0, -4, 10**12, 1.5, True, "8"):
                try:
                    spelling_of(family).read_config({name: bad}, "here")
                except Refused as refused:
                    said.append(f"{name} is {bad!r}, a size is a whole number" in str(refused))
        assert sum(said) >= 6, alike


def test_every_family_has_a_spelling() -> None:
    assert sorted(FAMILIES) == sorted(MODELS)
    assert all(spelling_of(f).CONFIG is MODELS[f] for f in MODELS)
