"""Speed and memory of preprocessing and of building indexes; every number of a table comes from one run.

    python benchmarks/data.py --megabytes 50 --workers 2

The corpus is assets/text repeated. Beside `isotron preprocess` (a whole command, with its start and its imports) stands
the usual way of doing it: a pool of processes, each line parsed, tokenized by itself with transformers' GPT-2 tokenizer
(tokens, then ids), handed back as a list and appended to the output. Written here for the comparison.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GPT2 = ROOT / "assets" / "gpt2"


def make_corpus(path: Path, megabytes: int) -> Path:
    """`megabytes` of assets/text/train.jsonl, repeated."""
    text = (ROOT / "assets" / "text" / "train.jsonl").read_bytes()
    with path.open("wb") as stream:
        for _ in range(max(1, megabytes * 1_000_000 // len(text))):
            stream.write(text)
    return path


HELD: list[Any] = []


def start() -> None:
    from transformers import GPT2TokenizerFast

    HELD[:] = [GPT2TokenizerFast.from_pretrained(str(GPT2), local_files_only=True)]


def encode_line(line: str) -> list[int]:
    tokenizer = HELD[0]
    return [*tokenizer.convert_tokens_to_ids(tokenizer.tokenize(json.loads(line)["text"])), 50256]


def usual_way(corpus: Path, output: Path, workers: int) -> None:
    """Line by line in a pool, as the standard tools of the field do it."""
    from isotron.data.indexed_writer import IndexedWriter

    with (
        multiprocessing.Pool(workers, initializer=start) as pool,
        corpus.open(encoding="utf-8") as lines,
        IndexedWriter(output, 50257) as writer,
    ):
        for ids in pool.imap(encode_line, lines, 32):
            writer.add_document(ids)


def timed(words: list[str]) -> dict[str, float]:
    """Seconds, CPU seconds and peak memory (of the largest process) of a command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - began, "cpu_seconds": cpu, "peak_mb": after.ru_maxrss / 1000}


def isotron_words(corpus: Path, output: Path, workers: int) -> list[str]:
    files = ["--vocab-file", str(GPT2 / "vocab.json"), "--merge-file", str(GPT2 / "merges.txt")]
    own = ["--input", str(corpus), "--output-prefix", str(output), "--append-eod", "--workers", str(workers)]
    return [sys.executable, "-m", "isotron", "preprocess", *own, *files]


def preprocessing(megabytes: int, workers: int, place: Path) -> list[dict[str, Any]]:
    from isotron.data.indexed import IndexedDataset

    corpus = make_corpus(place / "corpus.jsonl", megabytes)
    ours = timed(isotron_words(corpus, place / "ours", workers))
    usual = timed([sys.executable, __file__, "--usual", str(corpus), str(place / "usual"), "--workers", str(workers)])
    tokens = IndexedDataset(place / "ours_text_document").tokens
    for end in ("bin", "idx"):
        if (place / f"ours_text_document.{end}").read_bytes() != (place / f"usual.{end}").read_bytes():
            raise SystemExit(f"the .{end} files differ")
    rows = [{"what": name, **row, "mtokens_per_cpu_s": tokens / row["cpu_seconds"] / 1e6}
            for name, row in (("isotron preprocess", ours), ("line by line", usual))]  # fmt: skip
    rows.append({"what": "ratio", "seconds": usual["seconds"] / ours["seconds"]})
    rows[-1]["cpu_seconds"] = usual["cpu_seconds"] / ours["cpu_seconds"]
    return rows


def index_building(documents: int, tokens: int) -> list[dict[str, Any]]:
    """Seconds for the indexes of one epoch, all three."""
    import numpy as np

    from isotron.data.gpt_index import _sample_index, build_indexes

    lengths = np.random.RandomState(0).randint(1, 2 * tokens // documents, documents).astype(np.int32)
    began = time.perf_counter()
    made = build_indexes(lengths, range(documents), None, 2048, 1)
    all_three = time.perf_counter() - began
    began = time.perf_counter()
    _sample_index(lengths, made.document, len(made.shuffle), 2048)
    total = int(lengths.sum(dtype=np.int64))
    return [{"what": f"index of {documents:,} documents, {total:,} tokens", "seconds": all_three},
            {"what": "of it the sample index", "seconds": time.perf_counter() - began}]  # fmt: skip


def blending(sources: int, samples: int) -> list[dict[str, Any]]:
    """Seconds for the order of a blend."""
    import numpy as np

    from isotron.data.blend import normalized
    from isotron.data.blend_order import blend_order

    shares = normalized(list(np.random.RandomState(0).rand(sources) ** 2 + 1e-6))
    began = time.perf_counter()
    blend_order(shares, samples)
    return [{"what": f"blend of {sources:,} sources, {samples:,} samples", "seconds": time.perf_counter() - began}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--usual", nargs=2, type=Path)
    parser.add_argument("--memory", action="store_true", help="peak memory of 100 MB and 200 MB instead")
    args = parser.parse_args()
    if args.usual:
        usual_way(*args.usual, args.workers)
        return
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if args.memory:
            rows = [{"what": f"{size} MB", **timed(isotron_words(make_corpus(place / f"{size}.jsonl", size),
                     place / f"{size}", args.workers))} for size in (100, 200)]  # fmt: skip
        else:
            rows = preprocessing(args.megabytes, args.workers, place) + index_building(1_000_000, 1_000_000_000)
            rows += blending(4, 1_000_000) + blending(4_000, 1_000_000)
    for row in rows:
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
