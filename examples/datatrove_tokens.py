"""Token files from a datatrove pipeline: filter and deduplicate there, each task writes one part, the parts are joined.

    pip install datatrove
    python examples/datatrove_tokens.py --input-folder raw --output-prefix clean --tokenizer-model DIR --tasks 4

`token_files` is a step for any executor of datatrove: give `SlurmPipelineExecutor` the same pipeline with as many tasks
as there are machines, and call `join` once all are done. A task that fails is run again by datatrove and writes its
part anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from isotron.data.indexed_writer import IndexedWriter
from isotron.data.partitions import finish, join, part_prefix
from isotron.data.records import Share
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig

NAME = "text_document"
BATCH = 256  # documents that are encoded together


def token_files(
    data: Iterable[Any], rank: int = 0, world_size: int = 1, *, prefix: str, tokenizer_model: str
) -> Iterator[Any]:
    """The last step of a pipeline: the documents of task `rank` as its part of `prefix`; hands them on."""
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=tokenizer_model))
    writer = IndexedWriter(f"{part_prefix(prefix, Share(rank, world_size))}_{NAME}", tokenizer.vocab_size)
    documents = iter(data)
    try:
        while batch := list(islice(documents, BATCH)):
            for ids in tokenizer.encode_batch([document.text for document in batch]):
                if ids:
                    writer.add_document([*ids, tokenizer.eod])
            yield from batch
    except BaseException:
        writer.abort()
        raise
    finish(writer, tokenizer.describe(), append_eod=True)


def main() -> None:
    """Read a folder of JSON lines, drop what is very short, write tokens."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--input-folder", "--output-prefix", "--tokenizer-model"):
        parser.add_argument(name, required=True)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    last = partial(token_files, prefix=args.output_prefix, tokenizer_model=args.tokenizer_model)
    pipeline = [JsonlReader(args.input_folder), LambdaFilter(long_enough), last]
    LocalPipelineExecutor(
        pipeline, tasks=args.tasks, workers=args.workers, logging_dir=f"{args.output_prefix}.log"
    ).run()
    print(*join(args.output_prefix, args.tasks, [NAME]))


def long_enough(document: Any) -> bool:
    """What a real pipeline replaces by its own filters."""
    return len(document.text) >= 20


if __name__ == "__main__":
    main()
