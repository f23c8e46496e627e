"""Options of Megatron that would change numbers or memory and that isotron does not have: what to use instead. PURE."""

from __future__ import annotations

_OUT = "leave it out"
_LLAMA = "--family llama without it"
_STEPS = "the length of a run is counted in steps"
_STAGES = "layers are dealt to pipeline stages by number or by cost, the output layer counted at what it costs"
_BUILT = "this part is not built yet"
_FIM = ("the tokens are given by their ids", "--fim-rate 0.5 --fim-token-ids PREFIX,MIDDLE,SUFFIX")
_NULL = ("its last id ends documents, and padding is masked by its place", "--tokenizer-type NullTokenizer alone")
_TEMPLATE = ("conversations are written by the chat template in the tokenizer's files", "isotron finetune --load DIR")
_FP8 = ("8-bit training is not built yet", "--dtype bfloat16")
_FP4 = ("4-bit training is not built yet", "--dtype bfloat16")

# option: (case, fix)
REFUSED: dict[str, tuple[str, str]] = {
    "--pretrained-checkpoint": ("the checkpoint to begin with is --load", "--finetune --load DIR"),
    "--no-load-optim": ("a run is resumed with its optimizer state, or begins anew", "--finetune"),
    "--no-save-optim": ("a checkpoint always holds the optimizer state, so that it can be resumed", _OUT),
    "--ckpt-step": ("the step is part of the path", "--load DIR/step_00000010"),
    "--use-checkpoint-opt_param-scheduler": ("options given now override the checkpoint's", "leave it and --lr out"),
    "--use-checkpoint-opt-param-scheduler": ("options given now override the checkpoint's", "leave it and --lr out"),
    "--step-batch-size-schedule": ("the batch size is constant in this version", "--global-batch-size 128"),
    "--decrease-batch-size-if-needed": ("a batch that does not divide is refused", "--global-batch-size 128"),
    "--exit-interval": (_STEPS, "--train-iters 100 --lr-decay-iters 1000 to stop early on a longer schedule"),
    "--iterations-to-skip": ("steps cannot be skipped in this version", _OUT),
    "--skip-train": ("a run always trains", _OUT),
    "--full-validation": ("an evaluation has a fixed number of batches", "--eval-iters 100"),
    "--fine-grained-activation-offloading": ("activations of whole blocks are offloaded", "--cpu-offloading"),
    "--no-decoupled-weight-decay": ("it is another update rule", "--optimizer adam_l2"),
    "--fp8": _FP8,
    "--fp4": _FP4,
    "--fp16-lm-cross-entropy": ("the loss is always summed in float32 or wider", _OUT),
    "--apply-query-key-layer-scaling": ("scores are never scaled by the layer number", _OUT),
    "--apply-residual-connection-post-layernorm": (
        "residuals are taken before the norm, and behind it in BERT's own blocks",
        "leave it out, or --family bert --norm-placement post",
    ),
    "--apply-layernorm-1p": ("norm gains are stored as they are", _OUT),
    "--qk-layernorm": ("norms on queries and keys belong to a family", "--family qwen3"),
    "--add-qkv-bias": ("biases on queries, keys and values only belong to a family", "--family qwen2"),
    "--squared-relu": (
        "the activations are gelu, gelu_tanh (gpt) and SwiGLU (llama)",
        "--family gpt --activation gelu",
    ),
    "--quick-geglu": ("the activations are gelu, gelu_tanh (gpt) and SwiGLU (llama)", "--family gpt --activation gelu"),
    "--rotary-interleaved": ("rotary pairs are split in halves", _LLAMA),
    "--rotary-seq-len-interpolation-factor": (
        "it is the linear stretch of rotary positions",
        "--rope-scaling linear --rope-factor 2",
    ),
    "--window-size": (
        "windows belong to a family, and count the position itself",
        "--family mistral --sliding-window 4096",
    ),
    "--multi-latent-attention": ("latent attention belongs to a family", "--family deepseek_v3"),
    "--spec": ("models are chosen by family", "--family gpt"),
    "--init-method-xavier-uniform": ("initial weights are normal", "--init-method-std 0.02"),
    "--embedding-init-method-std": ("embeddings are drawn like all weights", "--init-method-std 0.02"),
    "--data-parallel-random-init": ("replicas start equal", "--seed 1234"),
    "--padded-vocab-size": ("the padding follows from a divisor", "--make-vocab-size-divisible-by 128"),
    "--no-pad-vocab-size": ("the padding follows from a divisor", "--make-vocab-size-divisible-by 1"),
    "--tokenizer-special-tokens": ("the tokenizer's files hold all its tokens", _OUT),
    "--tiktoken-pattern": ("the pattern follows from the file", _OUT),
    "--account-for-embedding-in-pipeline-split": (_STAGES, "--layer-split balanced"),
    "--account-for-loss-in-pipeline-split": (_STAGES, "--layer-split balanced"),
    "--use-tp-pp-dp-mapping": ("ranks are ordered TP, DP, PP, fastest first", _OUT),
    "--defer-embedding-wgrad-compute": ("the output layer's weight gradient is formed with its loss", _OUT),
    "--delay-wgrad-compute": ("the schedule says which weight gradients are deferred", "--schedule zb-h1"),
    "--ddp-num-buckets": ("buckets are given by size", "--ddp-bucket-size 40000000"),
    "--decoupled-lr": ("it is a multiple of --lr", "--param-groups head.*:lr_mult=0.1 embed.*:lr_mult=0.1"),
    "--decoupled-min-lr": ("all weights share one schedule", "--min-lr 0.00003"),
    "--muon-no-split-qkv": ("queries, keys and values are matrices of their own", _OUT),
    "--phase-transition-iterations": ("a run has one blend", "a run for each phase: --finetune --load DIR"),
    "--object-storage-cache-path": ("token files are mapped from a file system", "a copy on a disk, and its path"),
    "--dataloader-save": ("the place in the data is one integer in each checkpoint", _OUT),
    "--fim-split-sample": ("a document is rearranged as a whole", _OUT),
    "--fim-fragment-rate": ("a document is rearranged as a whole", "--fim-rate 0.5"),
    "--fim-no-prefix": ("every document may be rearranged", _OUT),
    "--fim-prefix-token": _FIM,
    "--fim-middle-token": _FIM,
    "--fim-suffix-token": _FIM,
    "--fim-eod-token": ("documents end with the tokenizer's end-of-document id", _OUT),
    "--retriever-seq-length": ("retrieval models are not built yet", _OUT),
    "--varlen-mock-dataset-config-json": ("made-up documents have one distribution of lengths", "--mock-data"),
    "--tokenizer-metadata": ("the kind of a tokenizer is told by its files", "--tokenizer-model DIR"),
    "--tokenizer-sentencepiece-legacy": ("the model file says how text is encoded", "--tokenizer-model FILE"),
    "--tokenizer-hf-include-special-tokens": ("encoding never adds special tokens", "isotron preprocess --append-eod"),
    "--tiktoken-num-special-tokens": ("the special tokens follow from the file", _OUT),
    "--null-tokenizer-eod-id": _NULL,
    "--null-tokenizer-pad-id": _NULL,
    "--sft-tokenizer-prompt-format": _TEMPLATE,
    "--tokenizer-prompt-format": _TEMPLATE,
    "--image-tag-type": ("models with images are not built yet", _OUT),
    "--force-system-message": _TEMPLATE,
    "--no-save-tokenizer-assets": ("a checkpoint always holds its tokenizer", _OUT),
    "--workers-to-check": ("workers follow from the cores and the size of the input", "--workers 8"),
    "--sft": ("conversations are fine-tuned on by a verb of their own", "isotron finetune --load DIR --data-path DIR"),
    "--fim-data": ("the share of documents is the switch", "--fim-rate 0.5 --fim-token-ids P,M,S"),
    "--no-check-for-nan-in-loss-and-grad": ("a step that is not finite is never applied", _OUT),
    "--wandb-entity": ("the entity is Weights & Biases' own setting", "the environment variable WANDB_ENTITY"),
    "--profile": ("profiling is not built yet", "python -m cProfile on a run with --tp 1 --pp 1 --dp 1"),
    "--use-pytorch-profiler": ("profiling is not built yet", "python -m cProfile on a run with --tp 1 --pp 1 --dp 1"),
    "--use-legacy-models": ("there is one implementation of each family", _OUT),
    "--find-optimal-num-workers": ("workers follow from the cores and the size of the input", "--workers 8"),
    "--yaml-cfg": ("config files are TOML", "--config run.toml"),
}

# Beginnings of options of whole areas.
PREFIXES: dict[str, tuple[str, str]] = {
    "--moe-": ("this part of mixtures of experts is not built", _OUT),
    "--fp8-": _FP8,
    "--fp4-": _FP4,
    "--mtp-": ("multi-token prediction is not built yet", _OUT),
    "--retro-": ("retrieval models are not built yet", _OUT),
    "--rl-": ("reinforcement learning is not built yet", _OUT),
    "--bert-": ("retrieval models are not built yet", "--family bert alone trains BERT"),
    "--hybrid-": ("the families are gpt and llama", "--family llama"),
    "--mamba-": ("the families are gpt and llama", "--family llama"),
    "--cuda-graph-": ("CUDA graphs are not built yet", _OUT),
    "--offload-": ("what goes to the host are optimizer state, weights and blocks", "--optimizer-cpu-offload"),
    "--inference-": ("training has no inference options", "isotron generate --help"),
}

# option: (the only values accepted, case for others, fix)
ONLY: dict[str, tuple[tuple[str, ...], str, str]] = {
    "--moe-router-dtype": (
        ("fp32",),
        "routers compute in float32, in float64 models in float64",
        "--moe-router-dtype fp32",
    ),
    "--num-distributed-optimizer-instances": (
        ("1",),
        "optimizer state is sharded over all of dp",
        "--num-distributed-optimizer-instances 1",
    ),
    "--muon-tp-mode": (
        ("duplicated", "distributed"),
        "muon works on whole matrices in every layout, and blocks of them would depend on it",
        "--muon-tp-mode duplicated",
    ),
    "--sample-rate": (("1", "1.0"), "all samples are read", "--sample-rate 1.0"),
    "--mid-level-dataset-surplus": (
        ("0.005",),
        "each source of a blend has half a percent of samples in reserve, more where they are drawn",
        "--mid-level-dataset-surplus 0.005",
    ),
    "--main-params-dtype": (("fp32",), "masters are float32", "--main-params-dtype fp32, or --master-remainders"),
    "--dataset-impl": (("mmap",), "data files are always memory-mapped", "--dataset-impl mmap"),
    "--empty-unused-memory-level": (("0",), "cached memory is kept", "--empty-unused-memory-level 0"),
}
