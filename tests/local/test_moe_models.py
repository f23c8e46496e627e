"""Models with experts and latent attention as a whole: generation, recompute in 16 bits, files, grouped products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from isotron.config.check import broken
from isotron.config.rules import Facts
from isotron.config.schema import PRESETS, RunConfig, changed
from isotron.core.batch import Batch
from isotron.core.layout import whole as everything
from isotron.core.mesh import Mesh
from isotron.core.models.deepseek_v3_config import DeepseekV3Config
from isotron.core.nn import experts
from isotron.core.nn import grouped as grouped_products
from isotron.core.nn.mtp import ahead
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.routing import sum_aux
from isotron.hub.live import from_hf, stream, to_hf
from isotron.hub.reader import HFSource
from isotron.inference.config import Ending, EngineConfig, Wish
from isotron.planner.parameters import count_parameters, rank_stages
from isotron.train.flops import step_flops
from isotron.train.selfcheck import scaled_case
from isotron.train.verify import Case, microbatches, randomise
from tests.generation import twin_engine
from tests.hf_twins import save

PROMPTS = [[(7 * i * i + j) % 131 for i in range(1, n)] for j, n in enumerate((40, 3, 21))]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, engine = twin_engine(name, tmp_path, EngineConfig(page=8, chunk=16))
    for prompt, (row,) in zip(PROMPTS, engine.answer(PROMPTS, Wish(ending=Ending(8))), strict=True):
        ids = torch.tensor([prompt])
        alone = theirs.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0,
            eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert row.new == alone.sequences[0, len(prompt) :].tolist()
        own = torch.log_softmax(torch.cat(alone.logits).double(), -1)
        assert row.logprobs == pytest.approx([float(own[i, t]) for i, t in enumerate(row.new)], abs=1e-5)


def tiny(**layout: Any) -> tuple[ParallelModel, Case]:
    cfg = replace(PRESETS["deepseek-v3-tiny"], vocab_size=131, max_position_embeddings=16, mtp_num_layers=1)
    case = Case(cfg, Layout(dp=1, make_vocab_size_divisible_by=1, **layout), sequence=16, micro_batch=2, global_batch=4)
    model = ParallelModel(cfg, case.layout, Mesh(), torch.bfloat16, torch.device("cpu"), 1)
    randomise(model, 3)
    return model, case


def test_recompute_in_16_bits_routes_alike() -> None:
    found = []
    for mode in ("none", "selective", "full"):
        model, case = tiny(recompute=mode)
        aux = sum_aux(model, model.forward_backward(microbatches(case, 0, model.mesh.group("dp")), 1e-2))
        (stage,) = model.stages.values()
        found.append((aux, stage.flat.grads.clone()))
    for aux, _ in found[1:]:
        assert all(torch.equal(aux[name], found[0][0][name]) for name in found[0][0])
    assert torch.equal(found[2][1], found[0][1])
    # a norm that is formed again for each projection that reads it adds up their gradients in another order
    assert (found[1][1] - found[0][1]).norm() < 0.05 * found[0][1].norm()


def test_a_bias_stays_float32_in_files(tmp_path: Path) -> None:
    model, _ = tiny()
    to_hf(model, tmp_path / "there")
    names = {name: t.dtype for name, t in stream(model)}
    biases = [n for n in names if n.endswith("e_score_correction_bias")]
    assert len(biases) == 4 and all(names[n] is torch.float32 for n in biases)
    back = from_hf(tmp_path / "there", Layout(dp=1, make_vocab_size_divisible_by=1))
    assert back.dtype is torch.bfloat16 and back.config.mtp_num_layers == 1
    for (name, a), (other, b) in zip(stream(model), stream(back), strict=True):
        assert name == other and torch.equal(a, b)


def test_each_expert_keeps_its_number(tmp_path: Path) -> None:
    twin = save("mixtral", tmp_path)
    source = HFSource(tmp_path)
    theirs = dict(twin.named_parameters())
    for i in range(3):
        whole = torch.empty(source.shapes[f"layers.{i}.mlp.experts.gate_up.weight"])
        source.read(f"layers.{i}.mlp.experts.gate_up.weight", everything(tuple(whole.shape)), whole)
        assert torch.equal(whole, theirs[f"model.layers.{i}.mlp.experts.gate_up_proj"].flatten(0, 1))


def test_one_grouped_product_is_one_product_per_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, found = torch.tensor([5, 0, 9, 2]), []
    for grouped in (False, True):
        monkeypatch.setattr(grouped_products, "has_grouped_matmul", lambda *_, grouped=grouped: grouped)
        generator = torch.Generator().manual_seed(1)
        layer = experts.Experts(4, 16, 8)
        for p in layer.parameters():
            p.data = torch.randn(p.shape, generator=generator)
        x = torch.randn(16, 16, generator=generator).requires_grad_()
        weight = torch.rand(16, generator=generator).requires_grad_()
        y = layer(x, weight, counts)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, weight.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


def test_tokens_further_ahead() -> None:
    row = torch.arange(6)[None]
    docs = torch.tensor([[0, 0, 0, 1, 1]])
    batch = Batch(row[:, :-1], row[:, 1:], torch.ones(1, 5), row[:, :-1], torch.tensor([0]), docs)
    ids, labels, mask = ahead(batch, 0)
    assert ids[0].tolist() == [1, 2, 3, 4, 5] and labels[0, :4].tolist() == [2, 3, 4, 5]
    assert mask[0].tolist() == [1, 1, 0, 1, 0]  # position 2 would predict the second word of another document
    ids, labels, mask = ahead(replace(batch, doc_ids=None), 1)
    assert ids[0, :4].tolist() == [2, 3, 4, 5] and labels[0, :3].tolist() == [3, 4, 5]
    assert mask[0].tolist() == [1, 1, 1, 0, 0]


def test_predictions_train_the_shared_embedding() -> None:
    with_loss, without = (gradient_of_embedding(n) for n in (1, 0))
    assert not torch.allclose(with_loss, without)


def test_tokens_further_ahead_written_out() -> None:
    """Depth k as its paper says it, on the positions that have a target: sums of the loss, two depths."""
    cfg: Any = replace(PRESETS["deepseek-v3-tiny"], vocab_size=131, max_position_embeddings=16, mtp_num_layers=2)
    case = Case(cfg, Layout(dp=1, make_vocab_size_divisible_by=1), sequence=16, micro_batch=2, global_batch=2)
    model = ParallelModel(cfg, case.layout, Mesh(), torch.float64, torch.device("cpu"), 1)
    randomise(model, 3)
    (batch,) = microbatches(case, 0, model.mesh.group("dp"))
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    found = model.forward_backward([batch], 1e-2)
    (stage,) = model.stages.values()
    module: Any = stage.module
    tokens = torch.cat((batch.tokens, batch.labels[:, -1:]), 1)

    def normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + cfg.norm_epsilon).rsqrt() * norm.weight

    with torch.no_grad():
        h = normed(module.hidden(batch, {}), module.norm)
        for k, depth in enumerate(module.mtp):
            n = batch.shape[1] - k - 1
            part = Batch(batch.tokens[:, :n], batch.labels[:, :n], batch.loss_mask[:, :n], batch.positions[:, :n],
                         batch.sample_ids)  # fmt: skip
            embedded = module.mtp_embed.weight[tokens[:, k + 1 : k + 1 + n]]
            pair = torch.cat((normed(embedded, depth.enorm), normed(h[:, :n], depth.hnorm)), -1)
            h = normed(depth.block(pair @ depth.join.weight.t(), module._context(part, torch.float64)), depth.norm)
            scores = torch.log_softmax(h @ module.head.weight.t(), -1)
            own = -scores.gather(-1, tokens[:, k + 2 : k + 2 + n, None]).sum()
            assert float(found[f"mtp/{k}"]) == pytest.approx(float(own), rel=1e-9)


def gradient_of_embedding(depths: int) -> torch.Tensor:
    cfg: DeepseekV3Config = replace(
        PRESETS["deepseek-v3-tiny"], vocab_size=131, max_position_embeddings=16, mtp_num_layers=depths
    )
    layout = Layout(dp=1, make_vocab_size_divisible_by=1)
    case = Case(cfg, layout, sequence=16, micro_batch=2, global_batch=2)
    model = ParallelModel(cfg, layout, Mesh(), torch.float64, torch.device("cpu"), 1)
    randomise(model, 3)
    model.forward_backward(microbatches(case, 0, model.mesh.group("dp")), 1e-2)
    (stage,) = model.stages.values()
    return stage.flat.sinks["embed.weight"].buffer.clone()


@pytest.mark.parametrize("preset", ["tiny-moe", "deepseek-v3-tiny"])
def test_the_planner_knows_every_byte(preset: str) -> None:
    fields = {"mtp_num_layers": 1} if preset.startswith("deepseek") else {}
    cfg = replace(PRESETS[preset], vocab_size=131, max_position_embeddings=16, **fields)
    layout = Layout(dp=1, make_vocab_size_divisible_by=8, ddp_bucket_size=3000)
    model = ParallelModel(cfg, layout, Mesh(), torch.float32, torch.device("cpu"), 1)
    (stage,), (part,) = model.stages.values(), rank_stages(cfg, layout, 0)
    assert part.elements == stage.flat.weights.numel()
    assert count_parameters(cfg) == model.count_parameters()
    assert [(s.start, s.stop) for s in part.spans] == [(b.start, b.stop) for b in stage.flat.buckets]


def test_a_step_counts_the_products_of_visited_experts() -> None:
    # dropout on probabilities: attention runs as plain products, which torch's counter knows
    cfg = replace(PRESETS["tiny-moe"], vocab_size=131, max_position_embeddings=32, attention_dropout=0.1)
    layout = Layout(dp=1, make_vocab_size_divisible_by=1)
    model = ParallelModel(cfg, layout, Mesh(), torch.float32, torch.device("cpu"), 1)
    batches = microbatches(Case(cfg, layout, sequence=32, micro_batch=2, global_batch=2), 0, model.mesh.group("dp"))
    with FlopCounterMode(display=False) as counter:
        model.forward_backward(batches, 1.0)
    assert counter.get_total_flops() == pytest.approx(step_flops(cfg, 64, 32, causal=False), rel=0.01)


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "deepseek-v2", "deepseek-v3"])
def test_the_self_check_scales_experts_down(preset: str) -> None:
    run = RunConfig(model=PRESETS[preset], layout=Layout(tp=8, pp=4, dp=2))
    case = scaled_case(run)
    small, full = case.model, PRESETS[preset]
    assert small.num_layers < 16 and small.expert_width == 8 * case.layout.tp and small.num_experts <= 8
    assert bool(small.moe_router_num_groups) == bool(full.moe_router_num_groups)
    assert bool(small.shared_width) == bool(full.shared_width)
    assert (len(small.moe_layers) < small.num_layers) == (len(full.moe_layers) < full.num_layers)
    assert small.layout(136).rules
    assert not [p for p in broken(changed(run, tp=1, pp=1), Facts()) if "moe" in p.asked]


@pytest.mark.parametrize(
    ("yours", "tested"),
    [
        (Layout(tp=2, dp=8, ep=16, etp=1), (2, 2, 2, 1)),
        (Layout(tp=1, dp=8, ep=4, etp=2), (1, 4, 2, 2)),
        (Layout(tp=4, dp=2, ep=2), (2, 2, 2, 2)),
        (Layout(tp=4, dp=3, ep=3, etp=4), (2, 2, 2, 2)),
    ],
)
def test_the_self_check_keeps_the_expert_view(yours: Layout, tested: tuple[int, int, int, int]) -> None:
    """(tp, dp, ep, etp) of the layout that is run; its ranks hold both views, and its experts divide."""
    case = scaled_case(RunConfig(model=PRESETS["mixtral-8x7b"], layout=yours))
    cut = case.layout
    assert (cut.tp, cut.dp, cut.ep, cut.expert_tp) == tested
    assert cut.tp * cut.data_ranks % (cut.expert_tp * cut.ep) == 0 and case.model.num_experts % cut.ep == 0
