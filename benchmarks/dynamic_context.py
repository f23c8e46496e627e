"""Fixed against dynamic context parallelism on documents of very different length: tokens per second of a step.

The lengths are those of the documents of the shipped corpus, raised to a power and scaled so that the longest fill a
row (a long tail); most documents are then far shorter than a row. All contenders train the same documents, isolated,
packed into the same rows, with the same most slots of a rank and microbatch (`tokens` / `cp`), and must find the same
loss: `rows` cuts every row over all cp ranks, as isotron's fixed context parallelism does; `documents` cuts every
document over all cp ranks, as Megatron's does with packed rows, each filled up to a multiple of 2 cp; `dynamic` deals
every document to as many of the dp x cp ranks as it needs. The rows of the first two go to the dp ranks in turns, in an
order drawn by chance.

The costs of a token, a pair, a microbatch and a message are measured first. For each contender it prints seconds on
this machine, seconds with a core per rank (`own_cores.py`), and the CPU-seconds of the busiest rank; for comparison
what one process takes for all rows, divided by the ranks: no work but the model's, all even.

    python benchmarks/dynamic_context.py [--tokens 4096] [--cp 2] [--dp 1] [--pp 1] [--rows 4] [--power 1] [--repeats 3]
        [--comm p2p] [--contenders rows documents dynamic]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from own_cores import Note, Notes, played
from torch.nn.functional import pad

from isotron.core import comm
from isotron.core.batch import Batch, Part
from isotron.core.mesh import AXES, Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.deal import Costs, deal, document_costs, loads
from isotron.core.parallel.dealt import documents
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.core.rows import Run, slots, zigzag
from isotron.data.packed import best_fit
from isotron.launch import run_ranks

TEXT = Path(__file__).resolve().parents[1] / "assets" / "text" / "train.jsonl"
MODEL = LlamaConfig(2, 256, 8, 8, 0, 688, 512, 0)
FIELDS = ("tokens", "labels", "loss_mask", "positions")
SHORT = 64  # tokens of the documents whose pairs hardly count
NOTES: list[Notes] = []  # of this process, which serves several contenders


@dataclass(frozen=True)
class Step:
    """Seconds, CPU-seconds, notes and loss of one rank's step."""

    wall: float
    worked: float
    notes: list[Note]
    loss: float


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
    bins = sorted(best_fit(drawn, tokens), key=lambda held: -sum(drawn[i] for i in held))[:rows]
    draw.shuffle(bins)
    docs, counted, positions = [], [], []
    for held in bins:
        sizes = [drawn[i] for i in held]
        free = tokens - sum(sizes)
        spread = [*sizes, *([free] if free else [])]
        docs.append(torch.cat([torch.full((n,), i) for i, n in enumerate(spread)]))
        positions.append(torch.cat([torch.arange(n) for n in spread]))
        counted.append((torch.arange(tokens) < sum(sizes)).float())
    ids = torch.randint(0, MODEL.vocab_size, (len(docs), tokens), generator=torch.Generator().manual_seed(1))
    places = torch.arange(len(docs))
    return Batch(ids, ids, torch.stack(counted), torch.stack(positions), places, torch.stack(docs))


def timed(rows: Batch, layout: Layout, repeats: int, by_document: bool = False) -> list[Step]:
    """Forward and backward of all rows on this rank, between barriers, after one to get warm."""
    torch.set_num_threads(1)
    mesh = Mesh(dist.get_rank() if dist.is_initialized() else 0, **layout.axes)
    config = replace(MODEL, max_position_embeddings=rows.shape[1])
    model = ParallelModel(config, layout, mesh, torch.float32, torch.device("cpu"), 1)
    mine = microbatches(model, rows, by_document)
    group, steps = mesh.group(*AXES), []
    NOTES[:] = NOTES or [Notes()]
    for _ in range(repeats + 1):
        comm.barrier(group)
        NOTES[0].begin()
        started, worked = time.perf_counter(), time.process_time()
        terms = model.forward_backward(mine, 1e-4)
        worked, notes = time.process_time() - worked, NOTES[0].end()
        comm.barrier(group)
        steps.append(Step(time.perf_counter() - started, worked, notes, sum(float(t) for t in terms.values())))
    return steps[1:]


def microbatches(model: ParallelModel, rows: Batch, by_document: bool) -> list[Batch]:
    """What this rank works on, one after the other."""
    if model.layout.hybrid_context_parallel:
        return model.deal([rows])
    dp, cp = model.mesh.group("dp"), model.mesh.group("cp")
    mine = [one_row(rows, i) for i in range(dp.index, rows.shape[0], dp.size)]
    return [cut_by_document(row, cp.index, cp.size) for row in mine] if by_document else mine


def one_row(rows: Batch, i: int) -> Batch:
    """Row i as a microbatch."""
    docs = None if rows.doc_ids is None else rows.doc_ids[i : i + 1]
    given: dict[str, Any] = {name: getattr(rows, name)[i : i + 1] for name in (*FIELDS, "sample_ids")}
    return Batch(**given, doc_ids=docs)


def cut_by_document(row: Batch, index: int, count: int) -> Batch:
    """What rank `index` of `count` holds of a row whose documents are each filled up and cut in a zigzag of its own."""
    (borders,), pieces, cuts = row.cuts or ((0, row.shape[1]),), [], [0]
    runs: list[list[Run]] = [[] for _ in range(count)]
    for start, stop in zip(borders, borders[1:], strict=False):
        length = -(-(stop - start) // (2 * count)) * 2 * count
        for i, own in enumerate(runs):
            held = sum(r.length for r in own)
            own += [Run(held + r.local, cuts[-1] + r.row, r.length) for r in zigzag(i, count, length)]
        pieces.append((start, stop, length - (stop - start)))
        cuts.append(cuts[-1] + length)
    filled = {name: torch.cat([pad(getattr(row, name)[:, a:b], (0, free)) for a, b, free in pieces], 1)
              for name in FIELDS}  # fmt: skip
    here = torch.tensor(slots(tuple(runs[index])))
    own_fields: dict[str, Any] = {name: x.index_select(1, here) for name, x in filled.items()}
    part = Part(tuple(map(tuple, runs)), (tuple(cuts),), filled["positions"])
    return replace(row, **own_fields, doc_ids=None, part=part)


def measured_costs(tokens: int, comm_type: str) -> Costs:
    """Seconds of a token, of a pair, of a microbatch, and of a token's keys and values passed on once."""
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    whole = Batch(ids, ids, torch.ones(1, tokens), torch.arange(tokens)[None], torch.zeros(1, dtype=torch.int64))
    cut = replace(whole, doc_ids=(torch.arange(tokens) // SHORT)[None])
    in_parts = Batch(**{name: getattr(whole, name).view(-1, 4 * SHORT) for name in FIELDS},
                     sample_ids=torch.arange(tokens // (4 * SHORT)),
                     doc_ids=(torch.arange(tokens) // SHORT).view(-1, 4 * SHORT))  # fmt: skip

    def work(rows: Batch, cp: int = 1) -> float:
        """Of all ranks."""
        layout = Layout(dp=1, cp=cp, cp_comm_type=(comm_type,))
        return sum(min(step.worked for step in rank) for rank in run_ranks(cp, timed, rows, layout, 3, timeout=120))

    one, few, parts, two = work(whole), work(cut), work(in_parts), work(whole, 2)
    pair = max((one - few) / (tokens * (tokens - SHORT) / 2), 1e-15)
    token = max((few - pair * tokens * (SHORT + 1) / 2) / tokens, 1e-15)
    more = len(in_parts.tokens) - 1
    return Costs(token, pair, max((parts - few) / more, token), max((two - one) / tokens, token / 1000))


def told(name: str, every: list[list[Step]], tokens: int) -> tuple[float, float, float]:
    """Seconds here, with a core per rank, and of the busiest rank; printed."""
    wall = statistics.median(step.wall for step in every[0])
    cores = statistics.median(max(played([rank[i].notes for rank in every])) for i in range(len(every[0])))
    work = [min(step.worked for step in rank) for rank in every]
    print(f"{name}: {wall:.3f} s, {tokens / wall:.0f} tokens/s; with a core per rank {cores:.3f} s, "
          f"{tokens / cores:.0f} tokens/s; CPU-seconds of the busiest rank {max(work):.3f}, of all {sum(work):.3f}",
          flush=True)  # fmt: skip
    return wall, cores, max(work)


def main() -> None:
    """Time all contenders and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"tokens": 4096, "cp": 2, "dp": 1, "pp": 1, "rows": 4, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--power", type=float, default=1.0)
    parser.add_argument("--comm", default="p2p")
    parser.add_argument("--contenders", nargs="+", default=["rows", "documents", "dynamic"])
    args = parser.parse_args()
    rows = packed(long_tail(args.tokens, args.power), args.tokens, args.rows)
    pieces, most, ranks = documents(rows), -(-args.tokens // args.cp), args.cp * args.dp
    costs = measured_costs(args.tokens, args.comm)
    modelled = document_costs(replace(MODEL, max_position_embeddings=args.tokens))
    alike = {"pp": args.pp, "cp_comm_type": (args.comm,)}
    fixed = Layout(dp=args.dp, cp=args.cp, **alike)
    given = (costs.token, costs.pair, costs.microbatch, costs.message)
    dynamic = Layout(
        dp=ranks, hybrid_context_parallel=True, max_seqlen_per_dp_cp_rank=most, hybrid_costs=given, **alike
    )
    sizes = sorted(p.length for p in pieces)
    print(f"{len(sizes)} documents of {sizes[0]} to {sizes[-1]} tokens, median {sizes[len(sizes) // 2]}, "
          f"mean {sum(sizes) / len(sizes):.0f}, in {args.rows} rows of {args.tokens}, "
          f"{100 * sum(sizes) / rows.tokens.numel():.1f} % full")  # fmt: skip
    of_token = [x / costs.token for x in given]
    print(f"of a token a pair costs {of_token[1]:.2e} (by multiply-adds {modelled.pair / modelled.token:.2e}), a "
          f"microbatch {of_token[2]:.0f}, a message {of_token[3]:.3f}")  # fmt: skip
    shares = deal(pieces, ranks, most, costs)
    even = loads(shares, ranks, costs)
    print(f"groups: {[sum(s.size == n for s in shares) for n in (1, 2, 4, 8, 16)]} of 1, 2, 4, 8, 16 ranks; "
          f"most work of a rank {max(even) * len(even) / sum(even):.3f} of the mean")  # fmt: skip
    alone = min(step.worked for step in run_ranks(1, timed, rows, Layout(dp=1), 1, timeout=300)[0])
    print(f"one process: {alone:.3f} CPU-seconds, {alone / (ranks * args.pp):.3f} a rank")
    found, losses = {}, []
    for name in args.contenders:
        layout = dynamic if name == "dynamic" else fixed
        every = run_ranks(ranks * args.pp, timed, rows, layout, args.repeats, name == "documents", timeout=300)
        found[name] = told(name, every, sum(sizes))
        losses.append(sum(rank[0].loss for rank in every))
    if max(losses) - min(losses) > 1e-4 * max(losses):
        raise RuntimeError(f"the contenders do not compute the same: losses {losses}")
    for name in args.contenders:
        if name != "dynamic" and "dynamic" in found:
            wall, cores, work = (a / b for a, b in zip(found[name], found["dynamic"], strict=True))
            print(f"dynamic is {wall:.2f} times as fast as {name}, with a core per rank {cores:.2f}, by the busiest "
                  f"rank's work {work:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
