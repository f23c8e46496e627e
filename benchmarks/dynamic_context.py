"""Fixed against dynamic context parallelism on documents of very different length: tokens per second of a step.

The lengths are those of the documents of the shipped corpus, raised to a power and scaled so that the longest fill a
row (a long tail); most documents are then far shorter than a row. Both sides train the same documents, isolated, packed
into the same rows: fixed deals every row to all ranks, dynamic deals every document to as many ranks as it needs. The
costs of a token and of a pair are measured first. Prints seconds and the ratio; and the CPU-seconds of the busiest rank
(its computing and its handling of messages), which is what a step would take with a core per rank and no latency.

    python benchmarks/dynamic_context.py [--tokens 4096] [--ranks 2] [--rows 4] [--power 1] [--repeats 4]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.deal import MICROBATCH_TOKENS, Costs, deal, document_costs, loads
from isotron.core.parallel.dealt import documents
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.data.packed import best_fit
from isotron.launch import run_ranks

TEXT = Path(__file__).resolve().parents[1] / "assets" / "text" / "train.jsonl"
MODEL = LlamaConfig(2, 256, 8, 8, 0, 688, 512, 0)


def long_tail(tokens: int, power: float) -> list[int]:
    """Document lengths of the shipped corpus, in characters, stretched so that the longest has `tokens`."""
    sizes = [len(json.loads(line)["text"]) for line in TEXT.open(encoding="utf-8")]
    longest = max(sizes)
    return [max(8, round(tokens * (n / longest) ** power)) for n in sizes]


def packed(lengths: list[int], tokens: int, rows: int) -> Batch:
    """Documents drawn from these lengths, packed into rows, of which the fullest are taken: hardly a slot is free."""
    draw, drawn = random.Random(1), [0]
    while sum(drawn) < (rows + 2) * tokens:
        drawn.append(draw.choice(lengths))
    bins = sorted(best_fit(drawn, tokens), key=lambda held: -sum(drawn[i] for i in held))
    docs, counted, positions = [], [], []
    for held in bins[:rows]:
        sizes = [drawn[i] for i in held]
        free = tokens - sum(sizes)
        spread = [*sizes, *([free] if free else [])]
        docs.append(torch.cat([torch.full((n,), i) for i, n in enumerate(spread)]))
        positions.append(torch.cat([torch.arange(n) for n in spread]))
        counted.append((torch.arange(tokens) < sum(sizes)).float())
    ids = torch.randint(0, MODEL.vocab_size, (len(docs), tokens), generator=torch.Generator().manual_seed(1))
    places = torch.arange(len(docs))
    return Batch(ids, ids, torch.stack(counted), torch.stack(positions), places, torch.stack(docs))


def timed(rows: Batch, layout: Layout, repeats: int) -> list[tuple[float, float]]:
    """(seconds, CPU-seconds) of forward and backward of all rows on this rank, between barriers."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(rank, **layout.axes)
    config = replace(MODEL, max_position_embeddings=rows.shape[1])
    model = ParallelModel(config, layout, mesh, torch.float32, torch.device("cpu"), 1)
    mine = model.deal([rows]) if layout.hybrid_context_parallel else [one_row(rows, i) for i in range(rows.shape[0])]
    group, seconds = mesh.group("cp", "dp"), []
    for _ in range(repeats + 1):
        comm.barrier(group)
        started, worked = time.perf_counter(), time.process_time()
        model.forward_backward(mine, 1e-4)
        worked = time.process_time() - worked
        comm.barrier(group)
        seconds.append((time.perf_counter() - started, worked))
    return seconds[1:]


def one_row(rows: Batch, i: int) -> Batch:
    """Row i as a microbatch."""
    names = ("tokens", "labels", "loss_mask", "positions", "sample_ids")
    docs = None if rows.doc_ids is None else rows.doc_ids[i : i + 1]
    return Batch(**{name: getattr(rows, name)[i : i + 1] for name in names}, doc_ids=docs)


def measured_costs(tokens: int) -> Costs:
    """Seconds of a token and of a pair, from a row of one document and the same row cut into short ones."""
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    short = 64
    whole = Batch(ids, ids, torch.ones(1, tokens), torch.arange(tokens)[None], torch.zeros(1, dtype=torch.int64))
    cut = replace(whole, doc_ids=(torch.arange(tokens) // short)[None])
    a, b = (min(w for _, w in run_ranks(1, timed, rows, Layout(dp=1), 2, timeout=120)[0]) for rows in (whole, cut))
    few, many = tokens * (short + 1) / 2, tokens * (tokens + 1) / 2
    pair = max((a - b) / (many - few), 1e-15)
    token = max((b - pair * few) / tokens, 1e-15)
    return Costs(token, pair, MICROBATCH_TOKENS * token)


def main() -> None:
    """Time both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--power", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    lengths = long_tail(args.tokens, args.power)
    rows = packed(lengths, args.tokens, args.rows)
    pieces, most = documents(rows), -(-args.tokens // args.ranks)
    costs = measured_costs(args.tokens)
    modelled = document_costs(replace(MODEL, max_position_embeddings=args.tokens))
    fixed = Layout(dp=1, cp=args.ranks)
    dynamic = Layout(dp=args.ranks, hybrid_context_parallel=True, max_seqlen_per_dp_cp_rank=most,
                     hybrid_costs=(costs.token, costs.pair, costs.microbatch))  # fmt: skip
    sizes = sorted(p.length for p in pieces)
    print(f"{len(sizes)} documents of {sizes[0]} to {sizes[-1]} tokens, median {sizes[len(sizes) // 2]}, "
          f"mean {sum(sizes) / len(sizes):.0f}, in {args.rows} rows of {args.tokens}, "
          f"{100 * sum(sizes) / rows.tokens.numel():.1f} % full")  # fmt: skip
    print(f"a pair costs {costs.pair / costs.token:.2e} of a token, by multiply-adds "
          f"{modelled.pair / modelled.token:.2e}")  # fmt: skip
    shares = deal(pieces, args.ranks, most, costs)
    work = loads(shares, args.ranks, costs)
    print(f"groups: {[sum(s.size == n for s in shares) for n in (1, 2, 4, 8)]} of 1, 2, 4, 8 ranks; "
          f"most work of a rank {max(work) * len(work) / sum(work):.3f} of the mean")  # fmt: skip
    found = {}
    for name, layout in (("fixed", fixed), ("dynamic", dynamic)):
        every = run_ranks(args.ranks, timed, rows, layout, args.repeats, timeout=300)
        middle = statistics.median(wall for wall, _ in every[0])
        work = [min(worked for _, worked in rank) for rank in every]
        found[name] = middle, max(work)
        print(f"{name}: {middle:.3f} s (median), {sum(sizes) / middle:.0f} tokens/s; CPU-seconds of the busiest rank "
              f"{max(work):.3f}, of all {sum(work):.3f}")  # fmt: skip
    (wall, work_fixed), (wall_dynamic, work_dynamic) = found["fixed"], found["dynamic"]
    print(f"dynamic is {wall / wall_dynamic:.2f} times as fast, by the busiest rank's work "
          f"{work_fixed / work_dynamic:.2f} times")  # fmt: skip


if __name__ == "__main__":
    main()
