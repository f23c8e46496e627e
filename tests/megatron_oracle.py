"""Run by the Python that has megatron-core: its GPT model on CPUs, written by it to a checkpoint, or read from one.

    python megatron_oracle.py write DIR KIND     a model with random weights, its logits in DIR/logits.npy
    python megatron_oracle.py train DIR KIND     three steps of AdamW, saved in bfloat16 with masters and moments, and
                                                 two steps more; the losses of all five in DIR/losses.npy
    python megatron_oracle.py read DIR           loads DIR/release as Megatron does, in either format; the same

KIND names an entry of `MODELS`. RANK, WORLD_SIZE, TP and PP come from the environment; gloo on CPUs. Megatron asks
CUDA a few questions on the way to a file; they are answered here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

BASE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "kv_channels": 8, "ffn_hidden_size": 48,
    "seq_length": 256, "max_position_embeddings": 256, "norm_epsilon": 1e-5, "group_query_attention": False,
    "num_query_groups": 8, "vocab_size": 131, "padded_vocab_size": 256, "add_bias_linear": True, "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": False, "normalization": "LayerNorm", "swiglu": False, "qk_layernorm": False,
    "position_embedding_type": "learned_absolute", "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "bias_gelu_fusion": False, "rotary_base": 10000, "rotary_percent": 1.0, "window_size": None,
    "use_rope_scaling": False, "rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": None,
}  # fmt: skip
LLAMA = {**BASE, "kv_channels": 12, "group_query_attention": True, "num_query_groups": 2, "add_bias_linear": False,
         "add_qkv_bias": False, "untie_embeddings_and_output_weights": True, "normalization": "RMSNorm",
         "swiglu": True, "position_embedding_type": "rope", "rotary_base": 500}  # fmt: skip
SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "kv_channels": 4, "ffn_hidden_size": 24,
         "num_query_groups": 4, "max_position_embeddings": 64}  # fmt: skip
MODELS = {"gpt": BASE, "llama": LLAMA, "qwen3": {**LLAMA, "qk_layernorm": True}, "small-gpt": {**BASE, **SMALL},
          "small-llama": {**LLAMA, **SMALL, "kv_channels": 6, "num_query_groups": 2}}  # fmt: skip
TINY = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "kv_channels": 4, "ffn_hidden_size": 12,
        "num_query_groups": 2, "max_position_embeddings": 64, "seq_length": 40, "padded_vocab_size": 136,
        "optimizer": "adam", "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6, "lr": 0.02, "min_lr": 0.02,
        "lr_decay_style": "constant", "lr_warmup_iters": 0, "weight_decay": 0.1, "clip_grad": 0.0,
        "micro_batch_size": 1, "global_batch_size": 1, "train_iters": 5, "consumed_train_samples": 3, "seed": 7,
        "split": "90,5,5"}  # fmt: skip
MODELS["tiny-llama"] = {**LLAMA, **TINY}
TOKENS = torch.arange(40)[None] * 7 % 131


def quiet_cuda() -> None:
    """What Megatron asks CUDA about, answered for a CPU."""
    from megatron.core.tensor_parallel import random

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *_, **__: self
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


def build(args: Namespace) -> Any:
    """Megatron's GPT model of these arguments, for this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    tp, pp = int(os.environ.get("TP", 1)), int(os.environ.get("PP", 1))
    parallel_state.initialize_model_parallel(tp, pp)
    activation = torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu
    if not args.swiglu and args.bias_gelu_fusion:  # the fused kernel is this approximation

        def activation(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x, approximate="tanh")

    config = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups, kv_channels=args.kv_channels, ffn_hidden_size=args.ffn_hidden_size,
        use_cpu_initialization=True, add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias,
        normalization=args.normalization, layernorm_epsilon=args.norm_epsilon, gated_linear_unit=args.swiglu,
        activation_func=activation, qk_layernorm=args.qk_layernorm, hidden_dropout=0.0, attention_dropout=0.0,
        window_size=tuple(args.window_size) if args.window_size else None, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        apply_rope_fusion=False, persist_layer_norm=False, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    return GPTModel(
        config, spec, vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent, rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, parallel_output=False,
    )  # fmt: skip


def logits(model: Any, directory: Path) -> None:
    """The logits of the last stage, passed from stage to stage by hand."""
    from megatron.core import parallel_state as ps

    n = TOKENS.shape[1]
    mask = torch.ones(1, 1, n, n, dtype=torch.bool).triu(1)
    model.eval()
    with torch.no_grad():
        if not ps.is_pipeline_first_stage():
            hidden = torch.empty(n, 1, model.config.hidden_size)
            dist.recv(hidden, ps.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        out = model(TOKENS, torch.arange(n)[None], mask)
        if not ps.is_pipeline_last_stage():
            dist.send(out.contiguous(), ps.get_pipeline_model_parallel_next_rank())
        elif ps.get_tensor_model_parallel_rank() == 0:
            np.save(directory / "logits.npy", out.numpy())


def write(directory: Path, kind: str) -> None:
    """A model with random weights, in both formats."""
    from megatron.core import dist_checkpointing

    args = Namespace(**MODELS[kind])
    model = build(args)
    rank = dist.get_rank() % int(os.environ.get("TP", 1))
    with torch.no_grad():
        for p in model.parameters():  # by size and part, so that copies of a tensor are equal
            part = rank if getattr(p, "tensor_model_parallel", False) else 0
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * p.numel() + part))
            p.copy_(noise * 0.1 + (1.0 if p.ndim == 1 and part == 0 else 0.0))
    step = directory / "iter_0000005"
    if dist.get_rank() == 0:
        step.mkdir(parents=True)
        (directory / "latest_checkpointed_iteration.txt").write_text("5")
    dist.barrier()
    logits(model, directory)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "model": model.sharded_state_dict()}
    dist_checkpointing.save(state, str(step))
    tp, pp = int(os.environ.get("TP", 1)), int(os.environ.get("PP", 1))
    name = f"mp_rank_{dist.get_rank() % tp:02d}" + (f"_{dist.get_rank() // tp:03d}" if pp > 1 else "")
    legacy = directory / "legacy" / name
    legacy.mkdir(parents=True)
    torch.save({**state, "model": model.state_dict()}, legacy / "model_optim_rng.pt")


def train(directory: Path, kind: str) -> None:
    """Steps of Megatron's own optimizer, whose `torch_dist` state is saved on the way."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    args = Namespace(**MODELS[kind])
    model = build(args)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1 + float(p.ndim == 1))
    groups = [{"params": [p for p in model.parameters() if (p.ndim == 1) == flat],
               "weight_decay": 0.0 if flat else args.weight_decay} for flat in (False, True)]  # fmt: skip
    adam = torch.optim.AdamW(groups, args.lr, (args.adam_beta1, args.adam_beta2), args.adam_eps)
    made, torch.tensor = torch.tensor, lambda *a, **k: made(*a, **{n: v for n, v in k.items() if n != "device"})
    optimizer = FP32Optimizer(adam, OptimizerConfig(clip_grad=0.0), None)
    torch.tensor = made
    losses = [_step(model, optimizer) for _ in range(3)]
    weights = model.sharded_state_dict()
    state = optimizer.sharded_state_dict(weights)
    by_id = {id(t.data): t for t in weights.values() if hasattr(t, "data") and isinstance(t.data, torch.Tensor)}
    state["fp32_from_fp16_params"] = [
        make_sharded_optimizer_tensor(by_id[id(p)], p.detach().clone(), "optimizer.state.fp32_param")
        for p in model.parameters()
    ]
    for entry in by_id.values():
        entry.data, entry.dtype = entry.data.detach().bfloat16(), torch.bfloat16
    step = directory / "iter_0000003"
    step.mkdir(parents=True)
    (directory / "latest_checkpointed_iteration.txt").write_text("3")
    args.bf16 = True
    whole = {"args": args, "checkpoint_version": 3.0, "iteration": 3, "model": weights, "optimizer": state}
    dist_checkpointing.save(whole, str(step))
    np.save(directory / "losses.npy", np.array([*losses, *(_step(model, optimizer) for _ in range(2))]))


def _step(model: Any, optimizer: Any) -> float:
    n = TOKENS.shape[1]
    out = model(TOKENS, torch.arange(n)[None], torch.ones(1, 1, n, n, dtype=torch.bool).triu(1))[..., :131]
    loss = torch.nn.functional.cross_entropy(out[0], TOKENS[0].roll(-1))
    for p in model.parameters():
        p.grad = None
    loss.backward()
    optimizer.step()
    return float(loss)


def read(directory: Path) -> None:
    """Load what the tracker names, into a model of the arguments stored with it."""
    from megatron.core import dist_checkpointing

    step = directory / (directory / "latest_checkpointed_iteration.txt").read_text()
    torch.serialization.add_safe_globals([Namespace])
    tp, pp, rank = int(os.environ.get("TP", 1)), int(os.environ.get("PP", 1)), dist.get_rank()
    legacy = step / (f"mp_rank_{rank % tp:02d}" + (f"_{rank // tp:03d}" if pp > 1 else "")) / "model_optim_rng.pt"
    if legacy.is_file():
        state = torch.load(legacy, weights_only=True)  # its own format: tensors and plain containers, nothing else
        model = build(state["args"])
    else:
        model = build(dist_checkpointing.load_common_state_dict(str(step))["args"])
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(step))
    model.load_state_dict(state["model"])
    logits(model, directory)


if __name__ == "__main__":
    quiet_cuda()
    place = {"rank": int(os.environ.get("RANK", 0)), "world_size": int(os.environ.get("WORLD_SIZE", 1))}
    dist.init_process_group("gloo", **place, init_method=f"file://{os.environ['MEETING']}")
    {"write": write, "read": read, "train": train}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    dist.destroy_process_group()
