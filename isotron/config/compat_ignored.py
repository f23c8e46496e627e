"""Options of Megatron that have no meaning here: words they take, and the reason that is printed. PURE.

Only options that change neither the numbers nor the memory of a run may stand here.
"""

from __future__ import annotations

_ONE = "isotron has one implementation of every layer"
_FUSED = "fused kernels are picked by what the device can do"
_FSDP = "what is sharded is said by --data-parallel-sharding-strategy, or --zero"
_ACC = "weight gradients are always formed beside their sums, in the type of --main-grads-dtype"
_COMM = "communication is overlapped where the layout allows it"
_FORMAT = "isotron has one checkpoint format, loadable in any layout"
_NEAR = "--local-save keeps the files of a node's ranks there, and one copy on the next node"
_CONFIG = "the model is always read from the checkpoint"
_TB = "TensorBoard files always hold every metric, in the run directory"
_LOG = "metrics.jsonl in the run directory always holds it"
_TIME = "step times are always in metrics.jsonl"
_TEST = "isotron evaluates on the validation data only"
_LAYOUT = "initial weights never depend on the layout or the device"
_HOST = "isotron schedules no Python garbage collection by hand"
_OFFLOAD = "the step on the host is torch's fused one, copies overlap with it, in memory that the device can copy from"
_PAD = "what a token sees follows from its place and document, and no mask is stored"
_SETUP = "process groups are set up from --tp, --pp, --dp"

# option: (words, -1 = all up to the next option; reason)
IGNORED: dict[str, tuple[int, str]] = {
    "--moe-grouped-gemm": (0, "experts are one grouped product where the device has it"),
    "--moe-use-legacy-grouped-gemm": (0, "experts are one grouped product where the device has it"),
    "--moe-permute-fusion": (0, "tokens are put in order in one pass"),
    "--moe-shared-expert-overlap": (0, "the shared expert always computes while tokens are under way"),
    "--moe-router-fusion": (0, "there is one implementation of the router"),
    "--moe-per-layer-logging": (0, "every layer's balance is in metrics.jsonl"),
    "--transformer-impl": (1, _ONE),
    "--use-mcore-models": (0, _ONE),
    "--use-flash-attn": (0, "flash attention is used where the device has it"),
    "--no-masked-softmax-fusion": (0, _FUSED),
    "--no-bias-gelu-fusion": (0, _FUSED),
    "--no-bias-swiglu-fusion": (0, _FUSED),
    "--no-bias-dropout-fusion": (0, _FUSED),
    "--no-rope-fusion": (0, _FUSED),
    "--apply-rope-fusion": (0, _FUSED),
    "--no-persist-layer-norm": (0, _FUSED),
    "--cross-entropy-loss-fusion": (0, "the loss is always chunked and never holds all logits"),
    "--cross-entropy-fusion-impl": (1, "the loss is always chunked and never holds all logits"),
    "--gradient-accumulation-fusion": (0, _ACC),
    "--no-gradient-accumulation-fusion": (0, _ACC),
    "--use-precision-aware-optimizer": (0, "the types of optimizer state are options of their own: --exp-avg-dtype"),
    "--overlap-cpu-optimizer-d2h-h2d": (0, _OFFLOAD),
    "--use-torch-optimizer-for-cpu-offload": (0, _OFFLOAD),
    "--no-pin-cpu-grads": (0, _OFFLOAD),
    "--no-pin-cpu-params": (0, _OFFLOAD),
    "--use-megatron-fsdp": (0, _FSDP),
    "--use-custom-fsdp": (0, _FSDP),
    "--bert-no-binary-head": (0, "whether a sentence follows another is not predicted"),
    "--attention-softmax-in-fp32": (0, "the softmax of attention always sums in float32"),
    "--no-query-key-layer-scaling": (0, "scores are never scaled by the layer number"),
    "--calculate-per-token-loss": (0, "the loss is always the mean over the unmasked tokens of the whole step"),
    "--distributed-backend": (1, "the back end follows the device: gloo on CPU, NCCL on GPU"),
    "--distributed-timeout-minutes": (1, _SETUP),
    "--disable-gloo-process-groups": (0, _SETUP),
    "--enable-gloo-process-groups": (0, _SETUP),
    "--lazy-mpu-init": (1, _SETUP),
    "--local-rank": (1, "ranks come from the launcher's environment"),
    "--use-cpu-initialization": (0, _LAYOUT),
    "--no-initialization": (0, _LAYOUT),
    "--no-async-tensor-model-parallel-allreduce": (0, _COMM),
    "--tp-comm-overlap": (0, _COMM),
    "--overlap-p2p-communication": (0, _COMM),
    "--no-overlap-p2p-communication": (0, _COMM),
    "--use-ring-exchange-p2p": (0, _COMM),
    "--no-align-grad-reduce": (0, _COMM),
    "--no-align-param-gather": (0, _COMM),
    "--ddp-average-in-collective": (0, "the loss is normalised before the backward, nothing is averaged"),
    "--deterministic-mode": (0, "the same layout and seed always give the same numbers"),
    "--manual-gc": (0, _HOST),
    "--manual-gc-interval": (1, _HOST),
    "--num-workers": (1, "samples are cut from memory-mapped files without loader processes"),
    "--num-dataset-builder-threads": (1, "the index of a billion tokens takes a tenth of a second"),
    "--dataloader-fast-cache-load": (0, "kept indexes are mapped, and found by what they were built from"),
    "--dataloader-defer-npy-index-mmap": (0, "kept indexes are mapped, and found by what they were built from"),
    "--allow-ambiguous-pad-tokens": (0, "padding is masked by its place, never by its id"),
    "--fim-pad-token": (1, "a row whose documents are rearranged is never shorter than before"),
    "--legacy-tokenizer": (0, "there is one implementation of each kind of tokenizer"),
    "--tokenizer-hf-use-fast": (0, "tokenizer.json is read by the tokenizers library"),
    "--use-gigatoken": (0, "it is used where it is installed and gives the same ids"),
    "--no-mmap-bin-files": (0, "data files are always memory-mapped"),
    "--no-create-attention-mask-in-dataloader": (0, _PAD),
    "--create-attention-mask-in-dataloader": (0, _PAD),
    "--test-data-path": (-1, _TEST),
    "--trust-remote-code": (0, "tokenizers are local files and run no code of their own"),
    "--ckpt-format": (1, _FORMAT),
    "--use-dist-ckpt": (0, _FORMAT),
    "--dist-ckpt-format": (1, _FORMAT),
    "--dist-ckpt-strictness": (1, "loading is always strict, in both directions"),
    "--auto-detect-ckpt-format": (0, _FORMAT),
    "--ckpt-fully-parallel-save": (0, _FORMAT),
    "--no-ckpt-fully-parallel-save": (0, _FORMAT),
    "--ckpt-fully-parallel-load": (0, _FORMAT),
    "--ckpt-assume-constant-structure": (0, _FORMAT),
    "--non-persistent-ckpt-type": (1, _NEAR),
    "--non-persistent-local-ckpt-algo": (1, _NEAR),
    "--replication": (0, _NEAR),
    "--replication-factor": (1, _NEAR),
    "--no-save-rng": (0, "no random state exists: numbers are functions of the seed and the position"),
    "--no-load-rng": (0, "no random state exists: numbers are functions of the seed and the position"),
    "--use-checkpoint-args": (0, _CONFIG),
    "--use-mp-args-from-checkpoint-args": (0, _CONFIG),
    "--exit-on-missing-checkpoint": (0, "a --load that finds nothing is always refused"),
    "--override-opt_param-scheduler": (0, "options given now always override the checkpoint's"),
    "--override-opt-param-scheduler": (0, "options given now always override the checkpoint's"),
    "--tensorboard-dir": (1, _TB),
    "--tensorboard-log-interval": (1, _TB),
    "--tensorboard-queue-size": (1, _TB),
    "--log-timers-to-tensorboard": (0, _TB),
    "--log-memory-to-tensorboard": (0, _TB),
    "--log-loss-scale-to-tensorboard": (0, _TB),
    "--no-log-loss-scale-to-tensorboard": (0, _TB),
    "--log-learning-rate-to-tensorboard": (0, _TB),
    "--no-log-learning-rate-to-tensorboard": (0, _TB),
    "--log-batch-size-to-tensorboard": (0, _TB),
    "--log-world-size-to-tensorboard": (0, _TB),
    "--log-validation-ppl-to-tensorboard": (0, _TB),
    "--wandb-save-dir": (1, "Weights & Biases writes under the run directory"),
    "--log-throughput": (0, _LOG),
    "--log-progress": (0, _LOG),
    "--log-params-norm": (0, "the norm of the parameters is not logged"),
    "--log-num-zeros-in-grad": (0, "zeros in the gradient are not counted"),
    "--log-energy": (0, "energy is not logged"),
    "--timing-log-level": (1, _TIME),
    "--timing-log-option": (1, _TIME),
    "--barrier-with-L1-time": (0, _TIME),
    "--no-barrier-with-level-1-timing": (0, _TIME),
    "--enable-one-logger": (0, "nothing is sent anywhere unless --wandb-project asks for it"),
    "--no-one-logger": (0, "nothing is sent anywhere unless --wandb-project asks for it"),
    "--log-interval": (1, "progress is shown as time passes"),  # of preprocessing; a training run has it
    "--keep-sequential-samples": (0, "documents are always written in the order of the input"),
    "--exit-signal-handler": (0, "SIGTERM, SIGUSR1 and SIGINT always save a checkpoint and stop the run"),
    "--exit-signal": (1, "SIGTERM, SIGUSR1 and SIGINT always save a checkpoint and stop the run"),
    "--check-for-nan-in-loss-and-grad": (0, "a step whose loss or gradient norm is not finite is never applied"),
}
