"""Options of saving and loading: the config section `[checkpoint]`. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.options import option


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints go and come from."""

    save: str = option("", "directory for checkpoints; empty means the run directory")
    load: str = option("", "a run or step_XXXXXXXX to resume, or a Hugging Face directory or ORG/NAME to begin with")
    finetune: bool = option(False, "take only the weights of load: new optimizer, step 0, data from the start")
    save_interval: int = option(0, "steps between checkpoints; 0 means only the last step", unit="steps")
    async_save: bool = option(
        False, "save in the background: the state is copied to host memory, training waits only for the copy"
    )
    on_save_failure: str = option(
        "stop",
        "when a checkpoint cannot be written (a full disk): stop the run, or continue it and try at the next interval",
        choices=("stop", "continue"),
    )
    remote_save: str = option(
        "", "also copy each checkpoint, once it is complete, to this address (s3://.., gs://.., any that fsspec opens)"
    )
    local_save: str = option(
        "",
        "directory that each node has for itself (/dev/shm/NAME, a local disk), for frequent checkpoints with a copy "
        "on the next node; resuming takes the newest of both places",
    )
    local_save_interval: int = option(0, "steps between checkpoints in local_save", unit="steps")
    local_save_ranks: int = option(
        0, "ranks that share a node and its local_save; 0 means as many as the launcher started on this one"
    )
    rename: tuple[str, ...] = option(
        (), "when only weights are taken: OLD=NEW names of tensors in load and in the model, one * on both sides"
    )
    strict_load: bool = option(
        True, "when only weights are taken: refuse tensors that are missing or have no place, instead of naming them"
    )
    keep_last: int = option(0, "complete checkpoints to keep; 0 means all")
    keep_every: int = option(
        0, "beside keep_last, keep checkpoints of steps that are a multiple of this; 0 means none", unit="steps"
    )
