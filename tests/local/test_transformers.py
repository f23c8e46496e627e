"""The same weights in `transformers`: logits and every gradient within 1e-5 of their largest value, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.train.verify import randomise

transformers = pytest.importorskip("transformers")

B, S, V = 2, 64, 131
LLAMA = LlamaConfig(2, 32, 8, 2, 12, 48, V, S, rope_theta=500.0)  # 4 queries per group, heads of 12, not 4
GPT = GPTConfig(2, 32, 4, 0, V, S, activation="gelu_tanh", hidden_dropout=0.0, attention_dropout=0.0)


def batch() -> Batch:
    rows = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(3))
    mask = torch.rand(B, S, generator=torch.Generator().manual_seed(4)).gt(0.3).float()
    return Batch(rows[:, :-1], rows[:, 1:], mask, torch.arange(S).expand(B, -1), torch.arange(B))


def ours(config: Any) -> ParallelModel:
    layout = Layout(dp=1, make_vocab_size_divisible_by=64)  # 131 -> 192: padding must not show
    model = ParallelModel(config, layout, Mesh(), torch.float32, torch.device("cpu"), 1)
    randomise(model, 2)
    return model


def llama_twin() -> Any:
    cfg = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=S, rms_norm_eps=1e-5, rope_theta=500.0,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(cfg).float()


def llama_names(get: Any, i: int) -> dict[str, Tensor]:
    """Their tensors of layer i under our names: q, k, v and gate, up in a row."""
    a, m = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
    return {
        "attention_norm.weight": get(f"model.layers.{i}.input_layernorm.weight"),
        "attention.qkv.weight": torch.cat([get(f"{a}{x}_proj.weight") for x in "qkv"]),
        "attention.out.weight": get(f"{a}o_proj.weight"),
        "mlp_norm.weight": get(f"model.layers.{i}.post_attention_layernorm.weight"),
        "mlp.gate_up.weight": torch.cat([get(f"{m}gate_proj.weight"), get(f"{m}up_proj.weight")]),
        "mlp.down.weight": get(f"{m}down_proj.weight"),
    }


def gpt_twin() -> Any:
    cfg = transformers.GPT2Config(
        vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=S, activation_function="gelu_new",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(cfg).float()


def gpt_names(get: Any, i: int) -> dict[str, Tensor]:
    """Their weights are inputs x outputs."""
    h = f"transformer.h.{i}."
    theirs = {
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    found = {f"{a}.weight": get(f"{h}{b}.weight").t() for a, b in theirs.items()}
    found |= {f"{a}.bias": get(f"{h}{b}.bias") for a, b in theirs.items()}
    for a, b in {"attention_norm": "ln_1", "mlp_norm": "ln_2"}.items():
        found |= {f"{a}.{kind}": get(f"{h}{b}.{kind}") for kind in ("weight", "bias")}
    return found


LLAMA_ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
GPT_ENDS = {
    "embed.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}


def as_ours(twin: Any, layer_names: Any, ends: dict[str, str], gradients: bool) -> dict[str, Tensor]:
    """Their weights or gradients under our names."""
    named = dict(twin.named_parameters())

    def get(name: str) -> Tensor:
        return named[name].grad if gradients else named[name]

    found = {a: get(b) for a, b in ends.items()}
    for i in range(2):
        found |= {f"layers.{i}.{name}": t for name, t in layer_names(get, i).items()}
    return found


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("recompute", [False, True])
def test_logits_and_gradients(family: str, recompute: bool) -> None:
    config, twin, names, ends = {
        "llama": (LLAMA, llama_twin, llama_names, LLAMA_ENDS),
        "gpt": (GPT, gpt_twin, gpt_names, GPT_ENDS),
    }[family]
    data, model, theirs = batch(), ours(config), twin()
    stage = model.stages[0]
    for block in stage.module.layers.values():
        block.recompute = block.mlp.recompute = recompute
    with torch.no_grad():
        for name, target in as_ours(theirs, names, ends, gradients=False).items():
            value = stage.module.get_parameter(name)[: len(target)]
            if target.is_leaf:
                target.copy_(value)
        _copy_fused(theirs, family, stage.module)
        for name, target in as_ours(theirs, names, ends, gradients=False).items():
            assert torch.equal(target, stage.module.get_parameter(name)[: len(target)]), name
    logits = theirs(data.tokens, position_ids=data.positions).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.labels.flatten(), reduction="none")
    weight = 1 / float(data.loss_mask.sum())
    (losses * data.loss_mask.flatten()).sum().mul(weight).backward()

    _, got = stage.module.eval().logits(data, {})
    close("logits", got, logits)
    terms = model.forward_backward([data], weight)
    close("loss", terms["loss"], (losses * data.loss_mask.flatten()).sum())
    wanted = as_ours(theirs, names, ends, gradients=True)
    assert wanted.keys() == stage.flat.sinks.keys()
    for name, gradient in wanted.items():
        close(name, stage.flat.sinks[name].buffer[: len(gradient)], gradient)


def close(what: str, a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape, what
    assert (a - b).abs().max() <= 1e-5 * b.abs().max(), what


def _copy_fused(theirs: Any, family: str, module: Any) -> None:
    """What is one tensor here and several, or a transposed one, there."""
    named = dict(theirs.named_parameters())
    for i in range(2):
        if family == "llama":
            qkv = module.get_parameter(f"layers.{i}.attention.qkv.weight").split([96, 24, 24])
            for letter, part in zip("qkv", qkv, strict=True):
                named[f"model.layers.{i}.self_attn.{letter}_proj.weight"].copy_(part)
            for which, part in zip(
                ("gate", "up"), module.get_parameter(f"layers.{i}.mlp.gate_up.weight").chunk(2), strict=True
            ):
                named[f"model.layers.{i}.mlp.{which}_proj.weight"].copy_(part)
        else:
            for a, b in {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc",
                         "mlp.down": "mlp.c_proj"}.items():  # fmt: skip
                named[f"transformer.h.{i}.{b}.weight"].copy_(module.get_parameter(f"layers.{i}.{a}.weight").t())
