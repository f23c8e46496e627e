"""The head of every dense family: present, absent, equal to the embedding or different from it, tied or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isotron.commands.convert import run_meta
from isotron.config.schema import MODELS
from isotron.core.errors import Refused
from isotron.core.layout import whole
from isotron.hub.convert import convert
from isotron.hub.families import spelling_of
from isotron.hub.reader import HFSource, their_shape

DENSE = ("gpt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "neox")
SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11, "max_position_embeddings": 8}


def written(directory: Path, family: str, tied: bool, head: str) -> Path:
    """A directory as Hugging Face's libraries write it, with `head`: present, absent, equal (to the embedding)."""
    spelling, cfg = spelling_of(family), replace(MODELS[family](**SIZES), tie_embeddings=False)
    table, generator, found = cfg.layout(11), torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for mapped in spelling.tensors(cfg):
        for name, rows in mapped.theirs().items():
            found[name] = torch.randn(their_shape(mapped, rows, table.rule(mapped.ours).shape), generator=generator)
    if head == "equal":
        found[spelling.HEAD] = found[spelling.EMBEDDING].clone()
    if head == "absent":
        del found[spelling.HEAD]
    directory.mkdir()
    fields = {**spelling.write_config(cfg), "model_type": spelling.MODEL_TYPE, "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def read(source: HFSource, name: str) -> torch.Tensor:
    out = torch.full(source.info(name)[1], torch.nan)
    source.read(name, whole(out.shape), out)
    return out


@pytest.mark.parametrize("family", DENSE)
def test_an_untied_head(family: str, tmp_path: Path) -> None:
    for head in ("present", "equal"):
        source = HFSource(written(tmp_path / head, family, False, head))
        assert not source.ignored
        assert torch.equal(read(source, "head.weight"), read(source, "embed.weight")) == (head == "equal")
    with pytest.raises(Refused, match=f"says tie_word_embeddings false, and there is no {spelling_of(family).HEAD}"):
        HFSource(written(tmp_path / "absent", family, False, "absent"))


@pytest.mark.parametrize("family", DENSE)
def test_a_tied_head(family: str, tmp_path: Path) -> None:
    name = spelling_of(family).HEAD
    for head in ("absent", "equal"):
        source = HFSource(written(tmp_path / head, family, True, head))
        assert "head.weight" not in source.names() and source.ignored == ([name] if head == "equal" else [])
    with pytest.raises(Refused, match=f"{name} differs from it"):
        HFSource(written(tmp_path / "present", family, True, "present"))


@pytest.mark.parametrize("family", DENSE)
def test_through_ours_and_back(family: str, tmp_path: Path) -> None:
    """A head that says nothing new is not written again; one that is a tensor of its own is."""
    for tied, head in ((True, "equal"), (False, "equal"), (False, "present")):
        place = tmp_path / f"{tied}{head}"
        convert(written(place, family, tied, head), tmp_path / f"{tied}{head}_ours", "isotron", run_meta)
        convert(tmp_path / f"{tied}{head}_ours", tmp_path / f"{tied}{head}_back", "hf", run_meta)
        old, new = (load_file(d / "model.safetensors") for d in (place, tmp_path / f"{tied}{head}_back"))
        kept = {n: t for n, t in old.items() if not (tied and n == spelling_of(family).HEAD)}
        assert kept.keys() == new.keys() and all(torch.equal(kept[n], new[n]) for n in new)
