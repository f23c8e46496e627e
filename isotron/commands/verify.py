"""`isotron verify`: the user's config scaled down, in the user's layout, against one process in float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from isotron.commands.run_options import JSON, prepare, run_help, tokenizer_entries
from isotron.config.catalogue import Option
from isotron.config.schema import RunConfig, changed
from isotron.core.errors import Refused

OWN = {
    "inject": Option(
        "inject",
        "str",
        "",
        "break something on purpose: the check must then fail",
        choices=("drop-allreduce", "double-bias"),
    ),
    **JSON,
}
# a verification makes its own data and its own few steps, on the CPU
UNUSED = (
    *("data_path", "valid_data_path", "mock_data", "split", "train_iters", "vocab_size", "device", "save", "inject"),
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "lr_warmup_iters", "lr_wsd_decay_iters"),
)


def run(words: Sequence[str]) -> int:
    """Verify the layout that the words describe; returns 0 when every comparison passes, 1 when one fails."""
    from isotron.train.selfcheck import main

    prepared = prepare([*words, "--device", "cpu"], OWN, UNUSED)
    for note in (*prepared.sought, *prepared.notes):
        print(f"note: {note}", file=sys.stderr)
    flags = prepared.flags
    config = _with_vocabulary(changed(prepared.config, device="cpu"))
    if prepared.provenance.get("global_batch_size") in ("default", "derived"):
        config = changed(config, global_batch_size=0)  # nobody said it: as many microbatches as show the most
    return int(main(config, inject=flags.get("inject", ""), as_json=bool(flags.get("json"))))


def _with_vocabulary(config: RunConfig) -> RunConfig:
    """The config with the tokenizer's vocabulary size, for the report alone; a tokenizer is not needed to verify."""
    if config.model.vocab_size:
        return config
    try:
        return changed(config, vocab_size=tokenizer_entries(config))
    except Refused as refused:
        print(f"note: the vocabulary size is not known: {refused.problems[0].case}", file=sys.stderr)
        return config


def help_text() -> str:
    """The options of verify."""
    return run_help("isotron verify: the options of a training command, and", OWN)
