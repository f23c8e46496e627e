"""Model FLOPs against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isotron.core.models.gpt_config import PRESETS as GPT
from isotron.core.models.llama_config import PRESETS as LLAMA
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.peaks import peak_flops
from isotron.train.flops import flops_per_device, matrix_elements, step_flops, utilisation

# hidden 8, 4 query heads of 2, 2 key/value heads, FFN 12, vocabulary 10
SMALL = LlamaConfig(3, 8, 4, 2, ffn_hidden_size=12, vocab_size=10, max_position_embeddings=16)


def test_small_llama_by_hand():
    qkv, out, gate_up, down, head = 8 * (8 + 4 + 4), 8 * 8, 8 * 24, 12 * 8, 8 * 10
    assert matrix_elements(SMALL) == 3 * (qkv + out + gate_up + down) + head
    dense = 6 * (3 * (qkv + out + gate_up + down) + head)
    attention = 3 * 3 * (2 * 2 * 8 * (16 + 1) / 2)  # layers x (forward + twice that) x scores and values
    assert step_flops(SMALL, 32, 16) == 32 * (dense + attention)


def test_tied_output_layer_costs_what_an_untied_one_does():
    assert step_flops(replace(SMALL, tie_embeddings=True), 32, 16) == step_flops(SMALL, 32, 16)


def test_padding_of_the_vocabulary_and_gpt_positions_cost_nothing():
    gpt = GPT["gpt2"]
    d = 768
    assert matrix_elements(gpt) == 12 * (3 * d * d + d * d + 8 * d * d) + 50257 * d


def test_grouped_queries_cost_less_than_full_ones_and_attention_the_same():
    full, grouped = replace(SMALL, num_key_value_heads=4), SMALL
    assert step_flops(full, 16, 16) - step_flops(grouped, 16, 16) == 16 * 6 * 3 * (8 * 2 * 2 * 2)


def test_causal_attention_is_half_of_the_square():
    long = 4096
    dense = 6 * matrix_elements(SMALL)
    causal = step_flops(SMALL, long, long) / long - dense
    square = step_flops(SMALL, long, long, causal=False) / long - dense
    assert causal / square == pytest.approx((long + 1) / (2 * long))


def test_real_models_agree_with_six_times_their_parameters():
    # 8.03e9 parameters less the input embedding, 6 FLOPs each, plus attention
    llama3 = LLAMA["llama3-8b"]
    dense = 6 * (8.03e9 - 128256 * 4096)
    assert step_flops(llama3, 1, 1) == pytest.approx(dense, rel=1e-3)
    assert step_flops(llama3, 8192, 8192) / 8192 == pytest.approx(dense + 3 * 32 * 4 * 4096 * 8193 / 2, rel=1e-3)


def test_rate_per_device_and_utilisation():
    rate = flops_per_device(8e15, seconds=2.0, world=8)
    assert rate == 5e14
    peak = peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    assert utilisation(rate, peak) == pytest.approx(5e14 / 989.4e12)
    assert utilisation(rate, peak_flops("x86_64", "float32")) is None


def test_a_table_whose_cost_is_not_in_its_shapes_is_not_guessed():
    from isotron.core.layout import Rule, Table

    class Experts(LlamaConfig):
        def layout(self, padded_vocab: int) -> Table:
            return Table((Rule("layers.*.experts.up.weight", (8, 16, 16)),))

    with pytest.raises(ValueError, match=r"experts\.up\.weight"):
        step_flops(Experts(2, 16, 4), 16, 16)
