"""The runtime against the simulator: sleeping stages, recorded traces, and where the weight gradients' FLOPs are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from isotron.core.batch import Batch
from isotron.core.mesh import Mesh
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.nn import logits
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.pipeline.actions import Action, Kind
from isotron.core.parallel.pipeline.events import LANES, Event, read_events
from isotron.core.parallel.pipeline.library import costs_of, plan
from isotron.core.parallel.pipeline.runtime import KEPT_SENDS, Nobody
from isotron.core.parallel.pipeline.simulate import simulate
from isotron.core.parallel.plan import Layout
from isotron.train.timeline import measured_bubble, measured_costs
from isotron.train.verify import Case, microbatches
from tests import sleepy
from tests.matrix import MODELS
from tests.ranks import runs

Ranks = Callable[..., list[Any]]
UNIT = 0.06  # seconds: long beside what waking a process takes
ATTEMPTS = 8  # on a busy machine sleepers wake late, which is not what is measured here


def measured(ranks: Ranks, name: str, p: int, m: int, v: int, attempt: int = 0) -> tuple[float, float, list[Event]]:
    """(bubble, seconds, events) of a step of sleeping stages, which sleep longer the more attempts have failed."""
    unit = UNIT * 2 ** min(attempt, 3)
    each = ranks(p, sleepy.run_step, name, p, m, v, (unit, unit, unit), timeout=120)
    events = [Event(*e) for rank in each for e in rank]
    work = [e for e in events if e.lane == LANES[2]]
    took = max(e.end for e in work) - min(e.start for e in work)
    return measured_bubble(events), took, events


OFTEN = [("gpipe", 2, 4, 1), ("1f1b", 3, 4, 1), ("interleaved", 2, 4, 2), ("zb-h1", 3, 4, 1), ("zbv", 2, 4, 2)]
SELDOM = [
    ("breadth-first", 3, 6, 2),
    ("zb-h2", 4, 8, 1),
    ("v-half", 3, 6, 2),
    ("v-min", 3, 6, 2),
    ("dualpipev", 3, 6, 2),
]


@pytest.mark.parametrize("name, p, m, v", [*OFTEN, *(pytest.param(*s, marks=pytest.mark.slow) for s in SELDOM)])
def test_the_measured_bubble_is_the_simulated_one(ranks: Ranks, name: str, p: int, m: int, v: int) -> None:
    wanted = max(simulate(plan(name, p, m, v)).bubble)
    found = []
    while len(found) < ATTEMPTS and (not found or abs(found[-1] - wanted) >= 0.03):
        found.append(measured(ranks, name, p, m, v, len(found))[0])
    assert abs(found[-1] - wanted) < 0.03, (wanted, found)


def test_zero_bubble_takes_less_time_than_1f1b(ranks: Ranks) -> None:
    """18 units of time against 14, whose sum of sleeping is the same."""
    plain, split = (min(measured(ranks, name, 3, 4, 1)[1] for _ in range(3)) for name in ("1f1b", "zb-h1"))
    assert split < plain, (split, plain)


def test_measured_costs_give_the_measured_time(ranks: Ranks) -> None:
    """The simulator under the costs that a step showed comes to the time that it took."""
    found = []
    while len(found) < ATTEMPTS and (not found or abs(found[-1] - 1) >= 0.1):
        _, took, events = measured(ranks, "zb-h1", 2, 4, 1, len(found))
        found.append(simulate(plan("zb-h1", 2, 4), measured_costs(events, 2)).makespan / took)
    assert abs(found[-1] - 1) < 0.1, found


def test_a_recorded_run_shows_prediction_and_measurement(ranks: Ranks, tmp_path: Path) -> None:
    cfg = runs.config(
        "llama", pp=2, schedule="zb-h1", trace=2, train_iters=3, micro_batch_size=1, global_batch_size=4,
        run_dir=str(tmp_path / "run"), save=str(tmp_path / "run"),
    )  # fmt: skip
    assert ranks(2, runs.train, cfg, str(tmp_path / "run"), timeout=120) == [0, 0]
    files = sorted((tmp_path / "run" / "trace").iterdir())
    assert [f.name for f in files] == ["step_00000001.json", "step_00000002.json"]
    trace = json.loads(files[1].read_text(encoding="utf-8"))
    lanes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert lanes == set(LANES)
    table = plan("zb-h1", 2, 4)
    for lane in ("predicted compute", "measured compute"):
        for rank in range(2):
            names = [e.name for e in read_events(trace, lane, (Kind.F, Kind.B, Kind.W)) if e.rank == rank]
            assert names == [str(a) for a in table.ranks[rank] if a.computes]
    facts = trace["otherData"]
    costs = costs_of(tuple(facts["schedule_costs"]), 2, 1)  # what --schedule-costs-from hands to a search
    assert simulate(table, costs).makespan == pytest.approx(1e6 * facts["predicted_s"], rel=1e-3)
    assert facts["schedule"] == "zb-h1" and facts["measured_s"] > 0 and facts["predicted_s"] > 0


def test_hidden_transfers_begin_before_the_compute_that_hides_them_ends(ranks: Ranks) -> None:
    """Every receive that the table posts ahead of a compute action is under way before that action ends."""
    for name, v in (("interleaved", 2), ("zbv", 2)):
        p, m = 2, 6
        events = measured(ranks, name, p, m, v)[2]
        hidden = 0
        for rank, row in enumerate(plan(name, p, m, v).ranks):
            at = {(e.lane, e.name): e for e in events if e.rank == rank}
            for position, action in enumerate(row):
                if action.kind not in (Kind.RECV_F, Kind.RECV_B):
                    continue
                user = Kind.F if action.kind is Kind.RECV_F else Kind.B
                between = []
                for later in row[position + 1 :]:
                    if (later.kind, later.stage, later.microbatch) == (user, action.stage, action.microbatch):
                        break
                    between += [later] if later.computes else []
                transfer = at[LANES[3], str(action)]
                for cover in between:
                    hidden += 1
                    assert transfer.start < at[LANES[2], str(cover)].end
        assert hidden > 4, name


class Flops:
    """An observer that counts the FLOPs of each kind of action."""

    def __init__(self) -> None:
        self.total = dict.fromkeys(Kind, 0)

    def computed(self, action: Action) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def counting() -> Any:
            with FlopCounterMode(display=False) as counter:
                yield
            self.total[action.kind] += counter.get_total_flops()

        return counting()

    def posted(self, actions: Any) -> None:
        pass

    def arrived(self, action: Action) -> Any:
        from contextlib import nullcontext

        return nullcontext()


# the output layer's share of the matrices is that of LLaMA 3 8B, 7 %, and of 3.2 1B, 21 %
PROPORTIONS = {
    "8B": LlamaConfig(4, 64, 4, 1, 0, 224, 250, 32),
    "1B": LlamaConfig(4, 64, 4, 1, 0, 256, 986, 32, tie_embeddings=True),
}


def flops_of(schedule: str, p: int, size: str, kept: int = 0) -> tuple[int, int, int]:
    """This rank's FLOPs in F, B and W actions of one step; logits take several chunks, of which `kept` MiB are kept."""
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    model_config = PROPORTIONS[size]
    layout = Layout(dp=1, pp=p, schedule=schedule, make_vocab_size_divisible_by=8, deferred_logits=kept)
    model = ParallelModel(model_config, layout, Mesh(rank, pp=p), torch.float32, torch.device("cpu"), 1)
    counter = Flops()
    model.runtime.observer = counter
    case = Case(model_config, layout, 32, 1, 4, dtype="float32")
    with patch.object(logits, "CHUNK_BYTES", 1):  # 16 tokens
        model.forward_backward(microbatches(case, 0, model.mesh.group("dp")), 1.0)
    return counter.total[Kind.F], counter.total[Kind.B], counter.total[Kind.W]


@pytest.mark.parametrize("schedule, size", [("zb-h1", "8B"), ("zb-h1", "1B"), ("zbv", "1B"), ("v-min", "8B")])
def test_all_weight_gradients_of_matrices_are_in_w(ranks: Ranks, schedule: str, size: str) -> None:
    """Also the output layer's, whose logits take several chunks, tied to an embedding of the same rank too."""
    config, tokens = PROPORTIONS[size], 4 * 32
    d, f, kv = config.hidden_size, config.ffn_hidden_size, config.num_key_value_heads * config.head_size
    head = config.vocab_size * d
    gradients = 2 * tokens * (config.num_layers * (2 * d * d + 2 * d * kv + 3 * d * f) + head)
    assert head / (gradients / 2 / tokens) == pytest.approx({"8B": 0.07, "1B": 0.21}[size], abs=0.01)
    again, kept, whole = (
        [sum(x) for x in zip(*ranks(2, flops_of, name, 2, size, mib), strict=True)]
        for name, mib in ((schedule, 0), (schedule, 64), ("1f1b", 64))
    )
    assert kept[2] == gradients and sum(kept) == sum(whole) and whole[2] == 0
    assert again[2] == gradients + 2 * tokens * head and again[:2] == kept[:2]  # logits once more


def test_lengths_may_differ_between_microbatches(ranks: Ranks) -> None:
    """Each microbatch has its own sequence length: the boundary follows it."""
    whole = ranks(1, sums_of_lengths, "1f1b", 1)[0]
    for schedule, p in (("1f1b", 2), ("zbv", 2), ("interleaved", 2)):
        sums = [s for s in ranks(p, sums_of_lengths, schedule, p) if s[0]]
        assert len(sums) == 1 and sums[0][0] == pytest.approx(whole[0], rel=1e-12)


def sums_of_lengths(schedule: str, p: int) -> tuple[float, int]:
    """The loss of three microbatches of 5, 16 and 9 tokens."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    chunks = 2 if schedule == "interleaved" else 1
    layout = Layout(dp=1, pp=p, schedule=schedule, vpp=chunks, make_vocab_size_divisible_by=8)
    model = ParallelModel(MODELS["llama"], layout, Mesh(rank, pp=p), torch.float64, torch.device("cpu"), 1)
    batches = []
    for i, length in enumerate((5, 16, 9)):
        row = torch.arange(length + 1)[None] * 7 % 131
        positions = torch.arange(length)[None]
        batches.append(Batch(row[:, :-1], row[:, 1:], torch.ones(1, length), positions, torch.tensor([i]), None))
    terms = model.forward_backward(batches, 1.0)
    return float(terms.get("loss", 0.0)), len(batches)


def alive_at_the_first_backward(schedule: str, microbatches_: int) -> int:
    """On the first rank: outputs that still have memory when the first backward begins."""
    import weakref

    from isotron.core import comm

    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    layout = Layout(dp=1, pp=2, schedule=schedule, make_vocab_size_divisible_by=8)
    model = ParallelModel(MODELS["llama"], layout, Mesh(rank, pp=2), torch.float32, torch.device("cpu"), 1)
    sent: list[Any] = []
    counts: list[int] = []
    exchange = comm.exchange

    def noting(sends: Any, receives: Any, group: Any) -> Any:
        sent.extend(weakref.ref(x.untyped_storage()) for x, _ in sends)
        return exchange(sends, receives, group)

    class First(Nobody):
        def computed(self, action: Action) -> Any:
            if action.kind is Kind.B and not counts:
                counts.append(sum(ref() is not None for ref in sent))
            return super().computed(action)

    model.runtime.observer = First()
    case = Case(MODELS["llama"], layout, 16, 1, microbatches_, dtype="float32")
    with patch.object(comm, "exchange", noting):
        model.forward_backward(microbatches(case, 0, model.mesh.group("dp")), 1.0)
    return counts[0]


def test_outputs_are_freed_when_they_are_sent(ranks: Ranks) -> None:
    assert ranks(2, alive_at_the_first_backward, "gpipe", 12)[0] <= KEPT_SENDS < 12
