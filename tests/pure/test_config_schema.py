"""The config of a run: its list of options, JSON and TOML forms, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from isotron.config.catalogue import Option, catalogue, check_value, parse_words
from isotron.config.schema import PRESETS, RunConfig, changed, from_dict, to_dict, to_toml, value
from isotron.config.tables import read_tables, read_toml, tomllib
from isotron.core.errors import Refused

OPTIONS = """
num_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq moe_router_score_function moe_norm_topk_prob
moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_group_scores
moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_load_balancing_type moe_aux_loss_coeff
moe_z_loss_coeff moe_input_jitter_eps moe_expert_capacity_factor moe_token_drop_policy
mtp_num_layers mtp_loss_scaling_factor q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
moe_pad_expert_input_to_capacity moe_shared_expert_intermediate_size moe_shared_expert_gate
activation adam_beta1 adam_beta2 adam_eps attention_bias attention_dropout mlp_bias check_interval clip_grad
data_cache_path data_path
ddp_bucket_size device dp dtype eod_mask_loss eval_interval eval_iters ffn_hidden_size finetune first_stage_layers
global_batch_size head_dim hidden_dropout hidden_size hysteresis init_method_std initial_loss_scale keep_last
last_stage_layers layers_per_stage load log_interval loss_scale loss_scale_window lr lr_decay_iters lr_decay_style
lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_wsd_decay_iters lr_wsd_decay_style make_vocab_size_divisible_by
max_position_embeddings merge_file micro_batch_size min_loss_scale min_lr mock_data norm_epsilon num_attention_heads
num_key_value_heads num_layers parallel_residual window_attn_skip_freq
query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping rope_local_theta sliding_window
first_window_layer rope_percent rope_scaling
rope_factor rope_original_positions rope_low_freq_factor rope_high_freq_factor rope_beta_fast rope_beta_slow
rope_truncate rope_mscale rope_mscale_all_dim rope_attention_factor rope_short_factor rope_long_factor optimizer
overlap_grad_reduce overlap_param_gather pp recompute recompute_num_layers reset_attention_mask reset_position_ids
rope_theta run_dir save save_interval schedule seed seq_length sequence_parallel split start_weight_decay
stuck_after_s end_weight_decay tensorboard tie_embeddings tokenizer_model tokenizer_type tp train_iters
valid_data_path vocab_file vocab_size vpp wandb_exp_name wandb_project weight_decay weight_decay_incr_style zero
sgd_momentum lion_beta1 lion_beta2 muon_momentum muon_nesterov muon_ns_steps muon_scale_mode muon_extra_scale_factor
adafactor_decay adafactor_clip adafactor_min_rms adafactor_eps
muon_others mup_base_hidden_size exp_avg_dtype exp_avg_sq_dtype master_remainders param_groups freeze
attention_backend recompute_method recompute_modules distribute_saved_activations cp cp_comm_type hierarchical_cp_sizes
hybrid_context_parallel max_seqlen_per_dp_cp_rank hybrid_costs
mlp_chunks activation_budget_gib cpu_offloading cpu_offloading_num_layers
ep etp moe_token_dispatcher_type overlap_moe_expert_parallel_comm
schedule_memory schedule_costs microbatch_group layer_split pipeline_layout recompute_keep deferred_logits trace
async_save
keep_every on_save_failure multiple_validation_sets
pack_documents fim_rate fim_spm_rate fim_cut fim_token_ids rampup_batch_size skip_samples vocab_extra_ids
eval_tasks on_nan spike_factor on_spike rerun straggler_interval
exit_duration_in_mins inject resume_check zero_shard_size grad_reduce_dtype main_grads_dtype optimizer_cpu_offload
optimizer_offload_fraction offload_weights offload_gradients offload_dir offload_dir_for
max_live_parameters max_live_gradients remote_save rename strict_load
encoder_num_layers decoder_num_layers decoder_seq_length decoder_start_token_id feed_forward_proj initializer_factor
relative_attention_num_buckets relative_attention_max_distance mask_prob mean_span_length sentinel_ids
type_vocab_size norm_placement mask_replace_prob random_replace_prob mask_token_id short_seq_prob
local_save local_save_interval local_save_ranks fp32_residual_connection softmax_type swiglu_alpha swiglu_limit
"""


def test_the_list_of_options_is_frozen():
    assert sorted(catalogue()) == sorted(OPTIONS.split())
    assert all(o.help for o in catalogue().values())


@pytest.mark.parametrize("preset", PRESETS)
def test_dict_and_toml_give_the_config_back(preset):
    config = changed(
        RunConfig(model=PRESETS[preset]),
        data_path=("0.3", 'a "quoted" b', "0.7", "ü"),
        layers_per_stage=(2, 1),
        lr=1e-5,
    )
    assert from_dict(to_dict(config)) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert tomllib.loads(to_toml(config)) == to_dict(config)


def test_leaves_are_found_by_name():
    config = changed(RunConfig(), tp=4, hidden_size=96, lr=0.1)
    assert (config.layout.tp, config.model.hidden_size, config.schedule.lr) == (4, 96, 0.1)
    assert value(config, "tp") == 4 and value(config, "activation") is None
    with pytest.raises(KeyError, match="activation"):
        changed(config, activation="gelu")


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"modle": {}}, "sections are model"),
        ({"layout": {"tpp": 2}}, "tpp"),
        ({"model": {"family": "bart"}}, "bart"),
    ],
)
def test_a_saved_config_with_unknown_names_is_refused(tree, words):
    with pytest.raises(Refused, match=words):
        from_dict(tree)


def test_tables_report_everything_that_is_wrong():
    tree = {
        "layout": {"tp": "two", "lr": 1.0, "ttp": 3},
        "modell": {},
        "model": {"preset": "llama9"},
        "data": {"split": 1},
    }
    leaves, _, problems = read_tables(tree, "run.toml")
    text = "\n".join(map(str, problems))
    assert leaves == {} and len(problems) == 6
    for part in (
        "'two' is not a whole number",
        "lr belongs to section [schedule]",
        "try:    tp",
        "[model]",
        "llama-tiny",
    ):
        assert part in text


def test_toml_file_that_is_missing_or_broken(tmp_path):
    with pytest.raises(Refused, match="no such file"):
        read_toml(str(tmp_path / "x.toml"))
    with pytest.raises(Refused, match=r"it is a directory[^$]*/run\.toml"):
        read_toml(f"{tmp_path}/")
    broken = tmp_path / "b.toml"
    broken.write_text("[layout\ntp = 2")
    with pytest.raises(Refused, match="cannot be read as TOML"):
        read_toml(str(broken))


@pytest.mark.parametrize(
    ("kind", "words", "result"),
    [
        ("int", ["40_000"], 40000),
        ("float", ["1e-4"], 1e-4),
        ("bool", ["True"], True),
        ("ints", ["2,3", "2"], (2, 3, 2)),
        ("strs", ["a", "b"], ("a", "b")),
    ],
)
def test_words_of_every_kind(kind, words, result):
    assert parse_words(Option("x", kind), words) == result


@pytest.mark.parametrize(
    ("kind", "word"), [("int", "1.5"), ("float", "nan"), ("float", "inf"), ("bool", "1"), ("ints", "a")]
)
def test_words_that_are_no_value(kind, word):
    with pytest.raises(ValueError, match="not"):
        parse_words(Option("x", kind), [word])


@pytest.mark.parametrize(
    ("kind", "raw"), [("int", True), ("int", 1.0), ("bool", 1), ("str", 2), ("strs", [1]), ("float", "1")]
)
def test_toml_values_of_the_wrong_type(kind, raw):
    with pytest.raises(ValueError, match="not"):
        check_value(Option("x", kind), raw)


def test_a_whole_number_is_a_number_and_text_is_a_list_of_one():
    assert check_value(Option("x", "float"), 3) == 3.0
    assert check_value(Option("x", "strs"), "a") == ("a",)


def test_config_and_help_load_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import isotron.config.load, isotron.config.check, isotron.config.resume\n"
        "from isotron.cli import main; sys.exit(main(['--help']) or main(['train', '--help']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "preprocess" in result.stdout and "--tensor-model-parallel-size" in result.stdout
