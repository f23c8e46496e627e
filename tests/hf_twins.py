"""Tiny models of `transformers` with random weights, one per family and kind of rotary stretch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

V, S = 131, 200  # an odd vocabulary; positions of a batch
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "rope_theta": 500.0}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}

DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
LATENT = {"vocab_size": V, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
          "initializer_range": 0.1, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
          "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 8,
          "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1}  # fmt: skip
# four queries per key/value head, heads of 12 that are not hidden/heads
SIZES = {"vocab_size": V, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1}  # fmt: skip
WIDE = {**SIZES, "head_dim": 12}

TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**WIDE, "rope_parameters": LLAMA3}),
    "llama-tied": ("Llama", {**WIDE, "rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "llama-biased": ("Llama", {**WIDE, "rope_parameters": PLAIN, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {**WIDE, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("Llama", {**WIDE, "max_position_embeddings": 128,
                                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": ("Llama", {**WIDE, "rope_parameters": YARN}),
    "mistral": ("Mistral", {**WIDE, "sliding_window": 17, "rope_parameters": PLAIN}),
    "mistral-full": ("Mistral", {**WIDE, "sliding_window": None, "rope_parameters": PLAIN}),
    "gemma2": ("Gemma2", {**WIDE, "sliding_window": 17, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0,
                          "final_logit_softcapping": 5.0, "rope_parameters": PLAIN}),
    "gemma2-untied": ("Gemma2", {**WIDE, "layer_types": ["sliding_attention"] * 3, "tie_word_embeddings": False,
                                 "attn_logit_softcapping": None, "final_logit_softcapping": None,
                                 "sliding_window": 31, "rope_parameters": LLAMA3}),
    "gemma3": ("Gemma3", {**WIDE, "num_key_value_heads": 1, "sliding_window": 17, "sliding_window_pattern": 3,
                          "query_pre_attn_scalar": 20, "final_logit_softcapping": 6.0,
                          "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0,
                                                                 "rope_theta": 5e4}, "sliding_attention": PLAIN}}),
    "olmo2": ("Olmo2", {**SIZES, "rope_parameters": YARN}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
                                   "routed_scaling_factor": 2.0, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v2-lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "rope_parameters": PLAIN}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
                                   "rope_parameters": DEEPSEEK_YARN}),
    "mixtral": ("Mixtral", {**WIDE, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None,
                            "router_aux_loss_coef": 0.0, "rope_parameters": PLAIN}),
    "gpt_oss": ("GptOss", {**WIDE, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 17,
                           "swiglu_limit": 0.4, "rope_parameters": {**YARN, "truncate": False},
                           "router_aux_loss_coef": 0.0}),
    "qwen2": ("Qwen2", {**SIZES, "rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", {**SIZES, "rope_parameters": PLAIN, "use_sliding_window": True, "sliding_window": 19,
                               "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", {**SIZES, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
                               "num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [1],
                               "router_aux_loss_coef": 0.0, "rope_parameters": PLAIN}),
    "qwen3_moe": ("Qwen3Moe", {**WIDE, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3,
                               "norm_topk_prob": True, "decoder_sparse_step": 2, "router_aux_loss_coef": 0.0,
                               "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {**WIDE, "rope_parameters": YARN}),
    "phi3": ("Phi3", {**SIZES, "hidden_size": 96, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64,
                      "pad_token_id": 0, "eos_token_id": 2}),
    "phi3-partial": ("Phi3", {**SIZES, "hidden_size": 128, "sliding_window": 21, "pad_token_id": 0, "eos_token_id": 2,
                              "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.75}}),
    "gpt2": ("GPT2", {"vocab_size": V, "n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 256, "resid_pdrop": 0.0,
                      "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1}),
    "gpt2-untied": ("GPT2", {"vocab_size": V, "n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 256,
                             "n_inner": 40, "activation_function": "gelu", "tie_word_embeddings": False,
                             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1}),
    "neox": ("GPTNeoX", {"vocab_size": V, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
                         "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.1,
                         "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "neox-serial": ("GPTNeoX", {"vocab_size": V, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
                                "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.1,
                                "use_parallel_residual": False, "hidden_act": "gelu_fast",
                                "rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}),
}  # fmt: skip


CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The twin with every weight, bias and gain random."""
    import transformers

    kind, fields = TWINS[name]
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**fields, attn_implementation="eager")
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    model.get_input_embeddings().padding_idx = None  # padding is masked by position here, not by id
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.3 + 1.0 if p.ndim == 1 and bool((p == 1).all()) else noise * 0.12)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    return model.to(dtype).eval()


def save(name: str, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The twin, after it was saved to a directory."""
    model = make(name, dtype)
    model.save_pretrained(directory, **options)
    return model
