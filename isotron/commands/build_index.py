"""`isotron train --build-index`: the indexes of a run's data, built and stored before the machines are booked."""

from __future__ import annotations

import time
from typing import Any

from isotron.config.schema import RunConfig
from isotron.core.errors import refuse


def build_index(config: RunConfig) -> int:
    """Build what the run will look for in its index cache, as one process without a model; returns the exit code."""
    from isotron.data.build import build_segments
    from isotron.data.masking import masking
    from isotron.tokenizers.build import build_tokenizer
    from isotron.train.feed import end_of

    if config.checkpoint.load and not config.checkpoint.finetune:
        asked = f"--build-index --load {config.checkpoint.load}"
        raise refuse(asked, "a resumed run finds the indexes that it was begun with", "--build-index without --load")
    given, vocab, eod, tokenizer = config.tokenizer, config.model.vocab_size, None, None
    if given.tokenizer_model or given.vocab_file:
        tokenizer = build_tokenizer(given, vocab)
        vocab, eod = vocab or tokenizer.vocab_size, tokenizer.eod
    train, began = config.train, time.monotonic()
    samples, held_out = end_of(train, 0, train.train_iters), train.eval_iters * train.global_batch_size
    known: dict[str, Any] = {"vocab_size": vocab, "eod": eod, "tokenizer": tokenizer}
    known["masking"] = masking(config.data, config.model, tokenizer)
    build_segments(config.data, train.seed, [samples], held_out, print, **known)
    print(f"the indexes of {samples:,} samples are ready, after {time.monotonic() - began:.1f} s")
    return 0
