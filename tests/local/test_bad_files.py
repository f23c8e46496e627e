"""Texts and files that are no UTF-8, models whose numbers are no numbers, devices that are none, damaged weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from isotron.core.errors import Refused
from isotron.core.mesh import ALONE
from isotron.evaluate.files import json_lines, table_rows
from isotron.hub.compare import differences
from isotron.hub.folder import open_folder
from isotron.hub.opened import open_model
from isotron.inference.session import find_step
from isotron.planner.hardware import find
from isotron.tokenizers.base import ids_by

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "checkpoint_v2"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 131,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def encode_batch_fast(texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
    """What the package does with a text that it cannot take."""
    if any("\ud800" <= c <= "\udfff" for text in texts for c in text):
        raise TypeError("TextEncodeInput must be Union[...]")
    return [SimpleNamespace(ids=[len(text)]) for text in texts]


def test_half_a_surrogate_pair() -> None:
    library = SimpleNamespace(encode_batch_fast=encode_batch_fast)
    assert ids_by(library, ["ab", ""]) == [[2], [0]]
    with pytest.raises(Refused, match=r"UTF-8 cannot write") as caught:
        ids_by(library, ["fine", "a\ud800b"])
    assert "'a\\ud800b'" in str(caught.value)


@pytest.mark.parametrize("reader", [json_lines, lambda task, path: table_rows(task, path, 2)])
def test_bytes_that_are_no_text(reader, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b'{"text": "a"}\tb\n'.replace(b"\tb", b"") + b"\xff\xfe\n")
    with pytest.raises(Refused, match="it is not UTF-8"):
        list(reader("mnli", path))


@pytest.mark.parametrize("value", ["sixty", [1], {"a": 1}])
@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_a_config_with_values_of_another_kind(field: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, field: value}))
    with pytest.raises(Refused):
        open_folder(tmp_path)


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_scaling", "rope_parameters", "max_position_embeddings"])
def test_a_config_with_words_for_numbers(field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, field: "sixty"}))
    with pytest.raises(Refused, match=r"config\.json|the model in"):
        open_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[device]\n", 'tp = "x"\n', "[model]\nnum_layers = 2\n"])
def test_a_file_that_describes_no_device(text: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(text)
    with pytest.raises(Refused, match="describes no device"):
        find(str(path))


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_difference_that_is_no_number_is_one(wrong: float) -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, wrong, 1.0])
    assert not differences({"logits": good}, {"logits": bad}, 1e-5)[0].close
    assert not differences({"logits": bad}, {"logits": bad}, 1e-5)[0].close


def test_a_flipped_byte_is_found_by_whoever_reads_weights(tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(CHECKPOINT, home)
    file = next(home.glob("step_*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x40
    assert find_step(str(home), ALONE) == file.parent
    file.write_bytes(data)
    for read in (open_model, lambda path: find_step(str(path), ALONE)):
        with pytest.raises(Refused, match=f"{file.name} is damaged"):
            read(home)
