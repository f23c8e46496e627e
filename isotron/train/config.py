"""Options of the training loop and of what it writes: the config sections `[train]` and `[log]`. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from isotron.config.fault_words import KINDS
from isotron.core.options import option


@dataclass(frozen=True)
class TrainConfig:
    """Batch sizes, length of the run, precision and device."""

    micro_batch_size: int = option(1, "sequences per forward pass on one data-parallel rank", unit="sequences")
    global_batch_size: int = option(
        0, "sequences per step over all ranks; 0 means micro_batch_size x dp", unit="sequences"
    )
    rampup_batch_size: tuple[int, ...] = option(
        (), "START,INCREMENT,SAMPLES: the batch grows to global_batch_size over so many samples", unit="sequences"
    )
    skip_samples: tuple[str, ...] = option((), "FIRST-LAST: stretches of the data order that no step takes")
    train_iters: int = option(0, "steps to train", unit="steps")
    eval_interval: int = option(0, "steps between evaluations; 0 means only after the last step", unit="steps")
    eval_iters: int = option(10, "batches of global_batch_size per evaluation; 0 means no evaluation")
    eval_tasks: tuple[str, ...] = option(
        (), "NAME=PATH: tasks of isotron evaluate that each evaluation also runs, on the model as it is"
    )
    seed: int = option(1234, "seed of weights, dropout and data order")
    dtype: str = option(
        "float32",
        "of weights and activations; 16-bit types keep float32 masters",
        choices=("float64", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "auto is cuda where there is one", choices=("auto", "cpu", "cuda"))
    check_interval: int = option(
        100, "steps between checks that replicated weights are equal on all ranks; 0 means never", unit="steps"
    )
    stuck_after_s: float = option(
        1800.0, "no step for this long ends the run with exit code 75; 0 means never", unit="seconds"
    )


@dataclass(frozen=True)
class FaultConfig:
    """What happens when something goes wrong; nothing of it is taken from a checkpoint."""

    on_nan: str = option(
        "skip",
        "a step whose loss or gradient norm is not finite: leave it out (20 in a row end the run), stop, or rewind to "
        "the last checkpoint and leave out the data since",
        choices=("skip", "stop", "rewind"),
    )
    spike_factor: float = option(
        0.0, "a loss above this many times the mean of the last 32 steps is a spike, which is not applied; 0 means none"
    )
    on_spike: str = option("skip", "the same for a spike", choices=("skip", "stop", "rewind"))
    rerun: bool = option(
        False, "take a step with such a loss again in place, to tell a fault of a device from one of model or data"
    )
    straggler_interval: int = option(
        0, "steps between reports of how long each rank worked and which is slowest; 0 means none", unit="steps"
    )
    exit_duration_in_mins: float = option(
        0.0, "save and stop (exit code 143) after this long; 0 means never", unit="minutes"
    )
    resume_check: bool = option(
        True, "after a resume, the first step must give the loss that the run which saved found on the same batch"
    )
    inject: tuple[str, ...] = option((), f"faults on purpose, KIND@STEP:RANK, kinds {', '.join(KINDS)}")


@dataclass(frozen=True)
class LogConfig:
    """The run directory and what is written there."""

    run_dir: str = option("", "directory of metrics, config and TensorBoard files; empty means save, or runs/<time>")
    trace: int = option(
        0, "record the pipeline's timeline of the first N steps under trace/ in the run directory", unit="steps"
    )
    log_interval: int = option(1, "steps between console lines", unit="steps")
    tensorboard: bool = option(True, "write TensorBoard files to the run directory")
    wandb_project: str = option("", "also log to this Weights & Biases project")
    wandb_exp_name: str = option("", "name of the run there")
