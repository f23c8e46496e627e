"""A decoder that sees pictures, against `transformers` in float32; what it does not take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.errors import Refused
from isotron.core.mesh import Mesh
from isotron.core.models.llava_config import PRESETS, LlavaConfig
from isotron.core.nn.vision import patches_of
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.split import balanced_counts, model_costs

pytest.importorskip("transformers")
V, S, MARK, SIDE = 131, 40, 7, 8
SIZES = {"vision_num_layers": 3, "vision_hidden_size": 24, "vision_num_attention_heads": 4, "image_size": 16,
         "vision_ffn_hidden_size": 40, "patch_size": SIDE, "image_token_id": MARK}  # fmt: skip
CONFIG = LlavaConfig(6, 32, 4, 2, 0, 48, V, S, **SIZES)  # type: ignore[arg-type]


def twin_of() -> Any:
    """The model of the other library with every weight random; of its four tower blocks the last one is not read."""
    import transformers

    tower = transformers.CLIPVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4, image_size=16, patch_size=SIDE
    )
    text = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=S, rms_norm_eps=1e-5,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=tower, text_config=text, image_token_index=MARK)
    twin = transformers.LlavaForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.3 + (1.0 if "norm" in name and "weight" in name else 0.0) if p.ndim == 1 else noise * 0.1)
    return twin


def theirs(name: str) -> list[str]:
    """Their tensors that one of ours stands for, one below the other."""
    fixed = {
        "vision.patch.weight": "model.vision_tower.embeddings.patch_embedding.weight",
        "vision.class_token": "model.vision_tower.embeddings.class_embedding",
        "vision.places": "model.vision_tower.embeddings.position_embedding.weight",
        "embed.weight": "model.language_model.embed_tokens.weight",
        "norm.weight": "model.language_model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in fixed:
        return [fixed[name]]
    owner, _, leaf = name.rpartition(".")
    if owner == "vision.norm":
        return [f"model.vision_tower.pre_layrnorm.{leaf}"]
    if owner.startswith("projector."):
        return [f"model.multi_modal_projector.linear_{1 + owner.endswith('down')}.{leaf}"]
    number, part = int(owner.split(".")[1]), owner.split(".", 2)[2]
    sees = number < CONFIG.vision_num_layers
    block = f"model.vision_tower.encoder.layers.{number}" if sees else f"model.language_model.layers.{number - 3}"
    parts = {
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.out": ["self_attn.out_proj" if sees else "self_attn.o_proj"],
        "attention_norm": ["layer_norm1" if sees else "input_layernorm"],
        "mlp_norm": ["layer_norm2" if sees else "post_attention_layernorm"],
        "mlp.up": ["mlp.fc1"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.fc2" if sees else "mlp.down_proj"],
    }
    return [f"{block}.{x}.{leaf}" for x in parts[part]]


def data() -> tuple[Batch, Tensor]:
    """Three rows with one picture, none and two; and the pictures as they are."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(8, V, (3, S + 1), generator=draw)
    for row, start in ((0, 3), (2, 0), (2, 20)):
        rows[row, start : start + CONFIG.patches] = MARK
    pictures = torch.randn(3, 3, 16, 16, generator=draw)
    mask = (rows[:, 1:] != MARK).float() * torch.rand(3, S, generator=draw).gt(0.3)
    positions = torch.arange(S).expand(3, -1)
    images = patches_of(pictures, SIDE)
    return Batch(rows[:, :-1], rows[:, 1:], mask, positions, torch.arange(3), images=images), pictures


def close(what: str, a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape, what
    assert (a - b).abs().max() <= 1e-5 * b.abs().max(), f"{what}: {(a - b).abs().max()} of {b.abs().max()}"


def test_logits_and_gradients() -> None:
    twin, (batch, pictures) = twin_of(), data()
    layout = Layout(dp=1, make_vocab_size_divisible_by=1)
    model = ParallelModel(CONFIG, layout, Mesh(), torch.float32, torch.device("cpu"), 1)
    (stage,) = model.stages.values()
    known = dict(twin.named_parameters())
    with torch.no_grad():
        for name, p in stage.module.named_parameters():
            p.copy_(torch.cat([known[n].flatten(1) if known[n].ndim > 2 else known[n] for n in theirs(name)]))
    found = twin(input_ids=batch.tokens, pixel_values=pictures).logits
    losses = torch.nn.functional.cross_entropy(found.flatten(0, 1), batch.labels.flatten(), reduction="none")
    weight = 1 / float(batch.loss_mask.sum())
    (losses * batch.loss_mask.flatten()).sum().mul(weight).backward()
    _, ours = stage.module.eval().logits(batch, {})
    close("logits", ours, found.detach())
    stage.module.train()
    model.forward_backward([batch], weight)
    assert set(stage.flat.sinks) == {name for name, _ in stage.module.named_parameters()}
    for name, sink in stage.flat.sinks.items():
        wanted = torch.cat([known[n].grad.flatten(1) if known[n].ndim > 2 else known[n].grad for n in theirs(name)])
        close(name, sink.buffer[: len(wanted)], wanted)


def test_what_a_batch_and_a_layout_must_be() -> None:
    asked = Layout(cp=2, tp=8, sequence_parallel=True, cpu_offloading=True)
    with pytest.raises(Refused) as refused:
        ParallelModel(CONFIG, asked, Mesh(), torch.float32, torch.device("cpu"), 1)
    assert len(refused.value.problems) == 4 and "--tp 8 with family llava" in str(refused.value)
    layout = Layout(dp=1)
    model = ParallelModel(CONFIG, layout, Mesh(), torch.float32, torch.device("cpu"), 1)
    batch, _ = data()
    few = Batch(*(getattr(batch, n) for n in ("tokens", "labels", "loss_mask", "positions", "sample_ids")))
    with pytest.raises(ValueError, match="without pictures"):
        model.forward_backward([few], 1.0)
    wrong = Batch(few.tokens, few.labels, few.loss_mask, few.positions, few.sample_ids, images=batch.images[:2])  # type: ignore[index]
    with pytest.raises(ValueError, match="12 tokens 7 for pictures, and 2 pictures of 4 patches"):
        model.forward_backward([wrong], 1.0)


def test_a_tower_is_dealt_by_what_it_costs() -> None:
    """One picture beside 2,048 tokens: a block of the tower costs a thirtieth of the decoder's."""
    model = LlavaConfig(**{**PRESETS["llava-1.5-7b"].__dict__, "max_position_embeddings": 2048})
    costs = model_costs(model)
    assert 20 < costs.blocks[-1] / costs.blocks[0] < 60 and len(costs.blocks) == 55
    counts = balanced_counts(costs, 4)
    assert counts[0] > 23 and max(counts[1:]) <= 9  # all of the tower and some of the decoder


def test_sizes_that_make_no_model_are_refused_together() -> None:
    wrong = {"patch_size": 7, "vision_num_attention_heads": 5, "vision_num_layers": 0, "image_token_id": V}
    with pytest.raises(Refused) as refused:
        replace(CONFIG, **wrong).check_layout(Layout(dp=1))
    text = str(refused.value)
    assert len(refused.value.problems) == 4 and all(name in text for name in wrong)
    CONFIG.check_layout(Layout(dp=1))
