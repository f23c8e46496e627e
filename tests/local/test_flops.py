"""Model FLOPs against what torch counts in a real forward and backward of one process."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from isotron.core.mesh import Mesh
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.olmo2_config import Olmo2Config
from isotron.core.models.t5_config import T5Config
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.split import model_costs
from isotron.planner import work
from isotron.planner.job import Job
from isotron.train.flops import step_flops
from isotron.train.verify import Case, microbatches

aten = torch.ops.aten
GPT = GPTConfig(2, 64, 4, 0, 96, 32)
LLAMA = LlamaConfig(3, 64, 4, 2, 0, 160, 101, 32)
NORMS_AFTER = Olmo2Config(3, 64, 4, 2, 0, 160, 101, 32)
WIDE = LlamaConfig(2, 48, 6, 3, 16, 128, 90, 32, tie_embeddings=True)  # heads wider than hidden / heads


def addmm(target: torch.Size, a: torch.Size, b: torch.Size, **_: Any) -> int:
    """The in-place form, which torch's table leaves out."""
    return 2 * a[0] * a[1] * b[1]


def fused(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * 2 * q[0] * q[1] * q[2] * q[3] * k[2]


def fused_backward(dy: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    return 5 * 2 * q[0] * q[1] * q[2] * q[3] * k[2]


def linear(x: torch.Size, w: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * w[0]


CPU_OPERATIONS = {
    aten.addmm_: addmm,
    **({torch.ops.mkldnn._linear_pointwise: linear} if torch.backends.mkldnn.is_available() else {}),
    aten._scaled_dot_product_flash_attention_for_cpu: fused,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: fused_backward,
}


def counted(config: Any, rows: Any = None, **leaves: Any) -> tuple[float, int]:
    """FLOPs that torch sees in a step of one process, and the step's positions; sequences of 32, or of `rows`."""
    case = Case(config, Layout(dp=1, make_vocab_size_divisible_by=64, **leaves), micro_batch=2, **rows or {})
    model = ParallelModel(config, case.layout, Mesh(), torch.float32, torch.device("cpu"), seed=1)
    batches = microbatches(case, 0, Mesh().group("dp"))
    with FlopCounterMode(display=False, custom_mapping=CPU_OPERATIONS) as counter:
        model.forward_backward(batches, weight=1.0)
    return counter.get_total_flops(), sum(b.tokens.numel() for b in batches)


@pytest.mark.parametrize("config", [GPT, LLAMA, WIDE], ids=["gpt", "llama", "wide"])
def test_equals_torchs_count(config):
    # with dropout on probabilities attention runs as plain products, two forward and four backward
    config = replace(config, attention_dropout=0.1)
    found, tokens = counted(config)
    assert step_flops(config, tokens, 32, causal=False) == pytest.approx(found, rel=0.01)
    assert step_flops(config, tokens, 32) < found


@pytest.mark.parametrize("config", [GPT, LLAMA, WIDE], ids=["gpt", "llama", "wide"])
def test_the_fused_kernel_forms_the_scores_once_more(config):
    config = replace(config, attention_dropout=0.0)
    found, tokens = counted(config)
    again = config.num_layers * 2 * config.num_attention_heads * config.head_size * 32 * tokens
    assert step_flops(config, tokens, 32, causal=False) + again == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("leaves", [{}, {"recompute": "full"}], ids=["kept", "again"])
def test_rows_of_an_encoder_and_of_a_decoder_count_for_themselves(leaves):
    """Scores are explicit; what each block costs, too, is what torch counts, so a balanced split balances."""
    config = T5Config(3, 2, 64, 4, 24, 160, 101, 32, decoder_seq_length=12, feed_forward_proj="gated-gelu")
    found, tokens = counted(config, {"sequence": 12, "source": 32}, **leaves)
    job = Job(config, Layout(dp=1, **leaves), 32, 1, tokens // 12)
    assert work.step_flops(job).hardware == pytest.approx(found, rel=0.01)
    assert step_flops(config, tokens // 12 * 32, 32, causal=False) == pytest.approx(work.step_flops(job).full)
    assert step_flops(config, tokens // 12 * 32, 32) == pytest.approx(work.step_flops(job).model)
    fewer, _ = counted(replace(config, decoder_num_layers=1), {"sequence": 12, "source": 32}, **leaves)
    costs = model_costs(config)
    share = (found - fewer) / found
    assert costs.blocks[-1] / (sum(costs.blocks) + costs.last) == pytest.approx(share, rel=0.01 if not leaves else 0.1)


@pytest.mark.parametrize("config", [GPT, LLAMA, NORMS_AFTER], ids=["gpt", "llama", "norms-after"])
@pytest.mark.parametrize("leaves", [{}, {"recompute_num_layers": 2}], ids=["by-one", "by-two"])
def test_the_planner_counts_what_is_computed_again(config, leaves):
    config = replace(config, num_layers=4, attention_dropout=0.1)
    found, tokens = counted(config, recompute="full", **leaves)
    job = Job(config, Layout(dp=1, recompute="full", **leaves), 32, 1, tokens // 32)
    assert work.step_flops(job).hardware == pytest.approx(found, rel=0.01)
    whole = work.step_flops(replace(job, whole_recompute=True)).hardware
    last = config.num_layers / leaves.get("recompute_num_layers", 1) * config.hidden_size * config.ffn
    left_out = 0 if config.family == "olmo2" else 2 * tokens * last
    assert whole - work.step_flops(job).hardware == pytest.approx(left_out)
