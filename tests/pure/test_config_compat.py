"""Megatron's options: what they reach, what is accepted without effect, what is refused, and the model families."""

from __future__ import annotations

import shlex

import pytest

from isotron.config import compat, compat_ignored, compat_refused, data_files
from isotron.config.catalogue import catalogue
from isotron.config.load import load, read
from isotron.config.schema import value
from isotron.core.errors import Refused

LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"


def config_of(line):
    return load(shlex.split(line))[0]


def refusal(line):
    with pytest.raises(Refused) as refused:
        load(shlex.split(line))
    return str(refused.value)


@pytest.mark.parametrize(
    ("line", "leaves"),
    [
        ("--pipeline-model-parallel-size 2 --data-parallel-size 3", {"pp": 2, "dp": 3}),
        ("--pipeline-parallel-size 2", {"pp": 2}),
        ("--num-virtual-stages-per-pipeline-rank 2", {"vpp": 2}),
        ("--virtual-pipeline-stages 2", {"vpp": 2}),
        ("--num-layers 24 --pp 2 --num-layers-per-virtual-pipeline-stage 4", {"vpp": 3}),
        ("--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2",
         {"first_stage_layers": 3, "last_stage_layers": 2}),
        ("--use-distributed-optimizer", {"zero": 1}),
        ("--use-distributed-optimizer --zero-stage 0", {"zero": 0}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero": 2}),
        ("--data-parallel-sharding-strategy optim_grads_params", {"zero": 3}),
        ("--use-torch-fsdp2 --grad-reduce-in-bf16", {"zero": 3, "grad_reduce_dtype": "bfloat16"}),
        ("--bf16 --main-grads-dtype bf16", {"dtype": "bfloat16", "main_grads_dtype": "bfloat16"}),
        ("--main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32", {"main_grads_dtype": "auto"}),
        ("--bf16", {"dtype": "bfloat16"}),
        ("--bf16 --fp16", {"dtype": "float16"}),
        ("--bf16 --dtype float64", {"dtype": "float64"}),
        ("--recompute-granularity full", {"recompute": "full", "recompute_num_layers": 1}),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
         {"recompute": "full", "recompute_num_layers": 2}),
        ("--recompute-activations", {"recompute": "selective"}),
        ("--save-checkpoint a --load-checkpoint b", {"save": "a", "load": "b"}),
        ("--group-query-attention --num-query-groups 4", {"num_key_value_heads": 4}),
        ("--num-query-groups 4", {"num_key_value_heads": 4}),
        ("--num-experts 8 --moe-router-load-balancing-type seq_aux_loss --moe-router-pre-softmax --moe-grouped-gemm",
         {"num_experts": 8, "moe_router_load_balancing_type": "sequence", "moe_norm_topk_prob": False}),
        ("--num-experts 8 --moe-router-load-balancing-type aux_loss --moe-router-dtype fp32 --moe-layer-freq [0]+[1]",
         {"moe_router_load_balancing_type": "batch", "moe_layer_freq": "[0]+[1]"}),
        ("--num-experts 8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --data-parallel-size 4 "
         "--moe-token-dispatcher-type allgather --moe-shared-expert-overlap",
         {"ep": 4, "etp": 1, "moe_token_dispatcher_type": "allgather"}),
        ("--kv-channels 32 --rotary-base 500000", {"head_dim": 32, "rope_theta": 500000.0}),
        ("--layernorm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
        ("--family gpt --openai-gelu", {"activation": "gelu_tanh"}),
        ("--family gpt --untie-embeddings-and-output-weights", {"tie_embeddings": False}),
        ("--merges-file m --vocab-file v", {"merge_file": "m", "vocab_file": "v"}),
        ("--train-samples 1000 --global-batch-size 8", {"train_iters": 125}),
        ("--train-samples 1000 --global-batch-size 8 --train-iters 3", {"train_iters": 3}),
        ("--train-iters 3 --train-samples 1004 --global-batch-size 8", {"train_iters": 125}),
        ("--lr-warmup-samples 80 --lr-decay-samples 800 --global-batch-size 8",
         {"lr_warmup_iters": 10, "lr_decay_iters": 100}),
        ("--train-data-path a b", {"data_path": ("a", "b"), "split": "100,0,0", "eval_iters": 0}),
        ("--train-data-path a --valid-data-path b", {"valid_data_path": ("b",), "split": "969,30,1"}),
        ("--dataloader-inter-document-masking", {"reset_attention_mask": True}),
        ("--adam-beta2 0.99 --clip-grad 0 --eval-iters 3", {"adam_beta2": 0.99, "clip_grad": 0.0, "eval_iters": 3}),
    ],
)  # fmt: skip
def test_meanings(line, leaves):
    config = config_of(line)
    assert {leaf: value(config, leaf) for leaf in leaves} == leaves


@pytest.mark.parametrize("flag", compat_ignored.IGNORED)
def test_options_without_effect_say_why(flag):
    count, reason = compat_ignored.IGNORED[flag]
    if flag[2:].replace("-", "_") in catalogue():  # of preprocessing only: a training run has an option of this name
        return
    loaded = read([flag, *["local"] * abs(count)])
    assert not loaded.problems and loaded.config == load([])[0]
    assert loaded.notes == (" ".join([flag, *["local"] * abs(count)]) + f": no effect: {reason}",)


@pytest.mark.parametrize("flag", [*compat_refused.REFUSED, *(f"{p}x" for p in compat_refused.PREFIXES)])
def test_options_that_would_change_something_are_refused(flag):
    text = refusal(f"{flag} 2 --tp 2")
    assert text.startswith(f"asked:  {flag} 2\n") and text.count("asked:") == 1


@pytest.mark.parametrize("flag", compat_refused.ONLY)
def test_options_with_one_legal_value(flag):
    legal = compat_refused.ONLY[flag][0]
    assert not read([flag, legal[0]]).problems
    assert f"asked:  {flag} 7" in refusal(f"{flag} 7")


def test_tables_do_not_overlap():
    tables = (compat.ALIASES, compat.SETS, compat.CHOICES, compat.LATE, compat_ignored.IGNORED, compat_refused.REFUSED,
              compat_refused.ONLY, data_files.FILES)  # fmt: skip
    flags = [flag for table in tables for flag in table]
    assert len(flags) == len(set(flags))
    own = {o.flag for o in catalogue().values()} & set(flags)
    assert own == {"--log-interval"}
    extra = {"max_new_tokens", "prompt", "top_k", "top_p"}  # options of generate
    assert set(compat.ALIASES.values()) - extra <= set(catalogue())


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--recompute-granularity most", ["full, selective", "--recompute-granularity full"]),
        ("--dataloader-type cyclic", ["--dataloader-type single"]),
        ("--zero-stage 4", ["4 is not one of -1, 0, 1, 2, 3"]),
        ("--train-samples 100", ["--global-batch-size"]),
        ("--train-samples 3 --global-batch-size 8", ["3 samples / 8", "--train-iters 1"]),
        (
            "--lr-warmup-samples 20 --global-batch-size 8",
            ["20 samples / 8 samples per step = 2 steps and 4", "--lr-warmup-iters 2"],
        ),
        ("--train-samples many", ["'many' is not a whole number above 0"]),
        ("--num-layers 24 --pp 2 --num-layers-per-virtual-pipeline-stage 5", ["24 layers / (pp 2 x 5", "-stage 4"]),
        ("--vpp 2 --decoder-first-pipeline-num-layers 3", ["--layers-per-stage"]),
        ("--group-query-attention", ["--num-query-groups 8"]),
        ("--family gpt --num-query-groups 4", ["only families gemma2, gemma3, llama", "--num-query-groups 4"]),
        ("--transformer-impl", ["the value is missing"]),
        ("--optimizer soap", ["not one of adamw"]),
    ],
)
def test_refusals(line, parts):
    text = refusal(line)
    assert all(part in text for part in parts), text


def test_files_of_data_paths(tmp_path):
    one, each, bad = (tmp_path / name for name in ("blend.txt", "splits.json", "bad"))
    one.write_text("0.7 a\n0.3 b\n")
    each.write_text('{"train": [0.5, "a", "0.5", "b"], "valid": ["c"], "test": null}')
    assert config_of(f"--data-args-path {one}").data.data_path == ("0.7", "a", "0.3", "b")
    config = config_of(f"--per-split-data-args-path {each}")
    assert (config.data.data_path, config.data.valid_data_path) == (("0.5", "a", "0.5", "b"), ("c",))
    each.write_text('{"train": ["a"]}')
    assert config_of(f"--per-split-data-args-path {each}").data.split == "100,0,0"
    flags = ("--data-args-path", "--per-split-data-args-path")
    for flag, text in ((flags[0], " "), (flags[1], "{"), (flags[1], "[]"), (flags[1], '{"train": [[]]}'),
                       (flags[1], '{"valid": ["a"]}')):  # fmt: skip
        bad.write_text(text)
        assert refusal(f"{flag} {bad}").startswith(f"asked:  {flag} {bad}\n")
    assert "cannot be read" in refusal(f"--data-args-path {tmp_path / 'none'}")


def test_what_gpt_does_anyway_is_accepted():
    assert config_of("--family gpt --num-query-groups 12 --kv-channels 64").model.family == "gpt"


def test_the_full_llama_combination_is_llama():
    model = config_of(f"{LLAMA} --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0").model
    assert model.family == "llama" and not model.tie_embeddings and model.dropout == (0.0, 0.0)
    loaded = read(shlex.split(LLAMA))
    assert loaded.config.model.tie_embeddings and loaded.config.model.dropout == (0.1, 0.1)
    assert "left to --defaults megatron: " in loaded.notes[-1] and "hidden_dropout 0.1" in loaded.notes[-1]


def test_megatrons_default_combination_is_gpt():
    line = "--position-embedding-type learned_absolute --normalization LayerNorm"
    assert config_of(line).model.family == "gpt"
    assert config_of(f"--defaults megatron {LLAMA}").model.family == "llama"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "--swiglu --normalization RMSNorm --position-embedding-type rope",
            ["nearest, llama", "missing --disable-bias-linear"],
        ),
        ("--swiglu", ["nearest, gpt", "too many --swiglu", "leave out --swiglu"]),
        ("--position-embedding-type rope --defaults megatron", ["too many --position-embedding-type rope"]),
        ("--family gpt --swiglu", ["family gpt (--family gpt) has mlp gelu", "--family llama"]),
        ("--preset llama-tiny --normalization LayerNorm", ["has norm RMSNorm"]),
    ],
)
def test_mixtures_are_refused(line, parts):
    text = refusal(line)
    assert all(part in text for part in parts), text


def test_switches_that_agree_with_the_family_are_fine():
    config = config_of(f"--preset llama-tiny {LLAMA}")
    assert config == config_of("--preset llama-tiny")


def test_pipeline_spellings():
    line = "--pp 2 --num-layers 5 --pipeline-model-parallel-layout Et*2|(t|)*2,tL --recompute full"
    line += " --num-microbatches-with-partial-activation-checkpoints 2"
    line += " --microbatch-group-size-per-virtual-pipeline-stage 3"
    layout = load(line.split())[0].layout
    assert (layout.pipeline_layout, layout.recompute_keep, layout.microbatch_group) == ("Et*2|(t|)*2,tL", 2, 3)
    assert layout.chunks == 2
