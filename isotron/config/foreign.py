"""The run that follows from a model that was not trained here: what a checkpoint's saved config would say. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotron.config.schema import RunConfig, changed, to_dict
from isotron.core.optim.config import OptimConfig
from isotron.core.precision.scaler import LossScaler
from isotron.hub.foreign import foreign_model

# section -> the leaves of it, or all of them
_BEGUN = {
    "model": (),
    "tokenizer": (),
    "data": ("seq_length", "eod_mask_loss", "reset_position_ids", "reset_attention_mask"),
    "train": ("dtype",),
}
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


def saved_run(model: Any, dtype: str, tokenizer: str) -> dict[str, dict[str, Any]]:
    """A run config in its saved form: the model, its dtype and tokenizer, sequences that it can hold."""
    config = changed(RunConfig(model=model), dtype=dtype, tokenizer_model=tokenizer)
    longest = model.max_position_embeddings
    return to_dict(changed(config, seq_length=min(config.data.seq_length, longest or config.data.seq_length)))


# Megatron's argument -> section and leaf of ours, where a run that goes on has the same meaning of it
_ARGUMENTS = {
    "adam_beta1": "optim", "adam_beta2": "optim", "adam_eps": "optim", "clip_grad": "optim", "lr": "schedule",
    "min_lr": "schedule", "lr_decay_style": "schedule", "lr_warmup_iters": "schedule", "lr_decay_iters": "schedule",
    "weight_decay": "schedule", "micro_batch_size": "train", "global_batch_size": "train", "train_iters": "train",
    "seed": "train", "split": "data", "seq_length": "data",
}  # fmt: skip


def resumed_meta(
    begun_run: Mapping[str, Mapping[str, Any]], args: Mapping[str, Any], updates: int, consumed: int
) -> dict[str, Any]:
    """What the manifest of a run elsewhere says, so that it is gone on with: its config, counters and data position."""
    config = {section: dict(table) for section, table in begun_run.items()}
    for name, section in _ARGUMENTS.items():
        value, default = args.get(name), config[section][name]
        if value is not None:
            config[section][name] = type(default)(value)
    samples = config["train"]["train_iters"] * config["train"]["global_batch_size"]
    scaler = LossScaler.for_run(config["train"]["dtype"], OptimConfig())
    return {
        "config": config, "updates": updates, "scaler": scaler.state(),
        "consumed_samples": consumed, "skipped": 0, "segments": [max(samples, consumed, 1)],
    }  # fmt: skip


def foreign_run(path: str | Path) -> Mapping[str, Mapping[str, Any]]:
    """What `--load` of a foreign checkpoint fixes: model, dtype, tokenizer, and a sequence length that fits."""
    model, dtype, place = foreign_model(path)
    return begun(saved_run(model, dtype, str(place) if place is not None and has_tokenizer(place) else ""))


def begun(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a new run takes over from the run that its weights come from: what makes the model what it is."""
    found: dict[str, dict[str, Any]] = {}
    for section, leaves in _BEGUN.items():
        table = tree.get(section, {})
        found[section] = {k: v for k, v in table.items() if not leaves or k in leaves}
    return found


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds the files of a tokenizer."""
    return any(all((directory / name).is_file() for name in names) for names in _TOKENIZERS)
