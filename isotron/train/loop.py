"""The training loop: asks for each step's microbatches, takes the step, and hangs everything else on it.

One step is `step.py`. Around it: metrics, checks, evaluation, checkpoints, and the decision to stop, which all ranks
take together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from isotron.core import device as devices
from isotron.core.checkpoint.locate import find_together
from isotron.core.errors import listed, refuse
from isotron.core.parallel.replicas import unequal_replicas
from isotron.data.batches import Prefetcher, microbatches
from isotron.exits import EXIT_FAILED, EXIT_OK, EXIT_SIGNALLED
from isotron.train.faults import Deadline, FiniteGuard, StopSignal, Watchdog
from isotron.train.feed import steps
from isotron.train.flops import step_flops
from isotron.train.injector import Injector
from isotron.train.judge import Judge, Rewind
from isotron.train.metrics import Metrics, StepRecord
from isotron.train.saving import Saves
from isotron.train.state import TrainState, load_state
from isotron.train.step import StepResult, train_step
from isotron.train.stragglers import Stragglers
from isotron.train.timeline import StepTracer

MAX_REWINDS = 10


class Measured(Protocol):
    """What a task came to."""

    def as_json(self) -> dict[str, Any]:
        """Plain values: task, metrics (name -> value and stderr), examples."""
        ...


@dataclass
class Run:
    """A state in progress with what feeds it, where it is saved and what it reports to.

    `rebuild` gives the training and validation data anew, after the position in them has moved. `end_of_step`: behind
    the samples of the step that is being taken. `data_wait`: seconds that it stood still for them. `tasks`: what each
    evaluation measures beside the loss.
    """

    state: TrainState
    train_data: Sequence[Any]
    valid_data: Sequence[Any] | Mapping[str, Sequence[Any]] | None
    eod: int | None
    saves: Saves
    metrics: Metrics
    stop: StopSignal
    watchdog: Watchdog
    guard: FiniteGuard
    judge: Judge
    injector: Injector
    deadline: Deadline
    rebuild: Callable[[], tuple[Sequence[Any], Sequence[Any] | None]]
    tasks: Callable[[], Sequence[Measured]] | None = None
    end_of_step: int = 0
    data_wait: float = 0.0
    stragglers: Stragglers = field(default_factory=Stragglers)

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.valid_data is not None or self.tasks is not None

    def batches(self, data: Sequence[Any], start: int, size: int) -> list[Any]:
        """This rank's microbatches of the global batch of `size` samples from `start` on, on its device."""
        cfg, mesh = self.state.config, self.state.model.mesh
        dp = mesh.group("dp")
        if cfg.layout.hybrid_context_parallel:
            rows = microbatches(data, start, size, size, 0, 1, cfg.data, self.eod)
            return [b.to(self.state.model.device) for b in self.state.model.deal(rows)]
        found = microbatches(
            data,
            start,
            size,
            cfg.train.micro_batch_size,
            dp.index,
            dp.size,
            cfg.data,
            self.eod,
        )
        return [b.to(self.state.model.device) for b in found]


def train(run: Run) -> int:
    """Train to `train_iters`; returns the exit code. A checkpoint of the last step is always written."""
    while True:
        try:
            return train_on(run)
        except Rewind as rewind:
            go_back(run, rewind)


def train_on(run: Run) -> int:
    """`train`, until a step sends the run back."""
    state, cfg = run.state, run.state.config
    if state.step >= cfg.train.train_iters:
        run.metrics.say(f"isotron: already at step {state.step} of {cfg.train.train_iters}; raise --train-iters")
    remaining = steps(cfg.train, state.consumed_samples, cfg.train.train_iters - state.step)
    tracer = StepTracer(state.model, cfg.log.trace, Path(cfg.log.run_dir or run.saves.far.directory))
    with Prefetcher((start, size, run.batches(run.train_data, start, size)) for start, size in remaining) as feed:
        for start, size, batches in feed:
            run.data_wait = feed.waited
            with tracer.step(state.step + 1, len(batches)):
                one_step(run, batches, range(start, start + size))
            run.deadline.look(run.stop)
            stop, failed = run.stop.agreed_with(run.saves.failing(), state.ranks.group)
            run.saves.look(failed)
            if stop:
                return stopped(run)
            if _due(state.step, cfg.checkpoint.save_interval) or state.step == cfg.train.train_iters:
                save(run)
            elif _due(state.step, cfg.checkpoint.local_save_interval):
                run.saves.save_near()
            if run.evaluates and _due(state.step, cfg.train.eval_interval) and evaluate(run) is None:
                return stopped(run)
    run.saves.save_last()
    if run.evaluates and not _due(state.step, cfg.train.eval_interval) and evaluate(run) is None:
        return stopped(run)
    run.guard.end()
    run.metrics.event("finished")
    return EXIT_OK


def stopped(run: Run) -> int:
    """End as a signal asked: with a checkpoint of the last step."""
    run.saves.save_last()
    run.metrics.event("stopped", signal=run.stop.name)
    return EXIT_SIGNALLED


def one_step(run: Run, batches: Sequence[Any], samples: range) -> None:
    """Take a step on the microbatches of `samples` and report it."""
    state, cfg = run.state, run.state.config
    run.end_of_step = samples.stop
    run.injector.before_step(state.step + 1)
    started = time.perf_counter()
    scale = state.scaler.scale
    run.stragglers.begin()
    result, verdict = run.judge.step(attempts(run, batches), state.step + 1)
    devices.synchronize(state.model.device)
    seconds = time.perf_counter() - started
    run.stragglers.end(seconds)
    state.step += 1
    state.consumed_samples = samples.stop
    state.skipped += result.skipped
    state.nan += not math.isfinite(result.loss)
    run.saves.after_step(result.loss)
    run.watchdog.beat(state.step)
    run.metrics.step(_record(run, result, seconds, scale, samples))
    scale_can_fall = state.scaler.can_fall
    if verdict is not None:
        run.metrics.event("suspect_step", why=verdict.why, fault=verdict.kind, applied=not result.skipped)
    run.guard.check(result.loss, result.grad_norm, result.skipped, state.step, scale_can_fall)
    run.injector.after_step(state.step, state.model)
    if _due(state.step, cfg.train.check_interval):
        _check_replicas(state)
    if _due(state.step, cfg.faults.straggler_interval):
        _report_stragglers(run)


def attempts(run: Run, batches: Sequence[Any]) -> Callable[[], StepResult]:
    """Takes the step, each time it is called, unless the judge does not admit it."""
    state, count = run.state, iter(range(10**6))

    def take() -> StepResult:
        with run.injector.while_computing(state.step + 1, state.model, next(count)):
            parts = state.model, state.optimizer, state.schedule, batches
            return train_step(*parts, state.scaler.scale, run.judge.admits)

    return take


def go_back(run: Run, rewind: Rewind) -> None:
    """To the last checkpoint, and on from there behind the data of the step that was no good."""
    state, end = run.state, run.end_of_step
    run.saves.settle(again=True)  # a save that failed is no place to go back to
    found = find_together(str(run.saves.far.directory), state.ranks, run.metrics.say)
    rewinds = state.rewinds + 1
    if found is None or rewinds > MAX_REWINDS:
        case = f"{rewind}; " + ("nothing has been saved yet" if found is None else f"{MAX_REWINDS} times before too")
        fix = "a smaller --lr or a longer --lr-warmup-iters, from an earlier checkpoint"
        raise refuse("--on-nan rewind or --on-spike rewind", case, fix, EXIT_FAILED)
    with run.watchdog.phase("going back"):
        load_state(state, found)
        left_out = [state.consumed_samples, end - 1]
        state.rewinds, state.consumed_samples = rewinds, end
        run.judge.recent = state.recent
        run.train_data, run.valid_data = run.rebuild()
        run.saves.gone_back()
    run.guard.consecutive = 0
    run.metrics.rewind(state.step)
    run.metrics.event("rewound", why=str(rewind), left_out=left_out)
    run.metrics.say(f"isotron: {rewind}: back to step {state.step}, without samples {left_out[0]} to {left_out[1]}")


def _report_stragglers(run: Run) -> None:
    found = run.stragglers.report(run.state.ranks.group)
    if found is not None:
        run.metrics.event("stragglers", **found)
        if found["straggler"]:
            seconds = ", ".join(f"{s:.3f}" for s in found["busy_s"])
            slow = f"rank {found['slowest']} works {found['ratio']:.2f} times as long as the median"
            run.metrics.say(f"isotron: straggler: {slow} (seconds a step by rank: {seconds})")


def _record(run: Run, result: StepResult, seconds: float, scale: float, samples: range) -> StepRecord:
    state, cfg = run.state, run.state.config
    positions = len(samples) * cfg.data.seq_length
    flops = step_flops(cfg.model, positions, cfg.data.seq_length) / seconds / state.model.mesh.size
    return StepRecord(
        step=state.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        tokens=result.tokens,
        consumed_samples=state.consumed_samples,
        step_time_s=seconds,
        data_wait_s=run.data_wait,
        flops_per_s_per_device=flops,
        skipped=result.skipped,
        sample_ids=(samples.start, samples.stop - 1),
        aux=result.aux,
        loss_scale=scale if cfg.train.dtype == "float16" else None,
    )


def save(run: Run) -> None:
    """Write a checkpoint, or begin to."""
    run.saves.save()


def evaluate(run: Run) -> float | None:
    """Loss per token of each validation set, reported; the mean over the sets.

    None when all ranks were told to stop meanwhile: whoever sends the signal does not wait for an evaluation.
    """
    sets = run.valid_data if isinstance(run.valid_data, Mapping) else {"valid": run.valid_data}
    sets = {name: data for name, data in sets.items() if data is not None}
    losses = []
    for name, data in sets.items():
        loss = _evaluate_set(run, name, data)
        if loss is None:
            return None
        losses.append(loss)
    if run.tasks is not None:
        started = time.perf_counter()
        with run.watchdog.phase("evaluation"):
            for found in run.tasks():
                run.metrics.task(run.state.step, found.as_json(), time.perf_counter() - started)
    return sum(losses) / max(len(losses), 1)


def _evaluate_set(run: Run, name: str, data: Sequence[Any]) -> float | None:
    """Loss per token on the first `eval_iters` global batches of a validation set, the same on every rank."""
    state, cfg = run.state, run.state.config
    total, tokens, started = 0.0, 0, time.perf_counter()
    with run.watchdog.phase("evaluation"):
        for i in range(cfg.train.eval_iters):
            batches = run.batches(data, i * cfg.train.global_batch_size, cfg.train.global_batch_size)
            terms = state.model.evaluate(batches)
            total += state.model.sum_terms(terms, ["loss"])[0]
            tokens += int(state.model.count_tokens(batches))
            run.watchdog.beat(state.step)
            if run.stop.agreed(state.ranks.group):
                return None
    loss = total / max(tokens, 1)
    run.metrics.evaluation(state.step, name, loss, tokens, time.perf_counter() - started)
    return loss


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _check_replicas(state: TrainState) -> None:
    differing = unequal_replicas(state.model)
    if differing:
        raise refuse(
            f"weights that are equal on all ranks at step {state.step}",
            f"these differ between ranks: {listed(differing)}",
            "resume from the last checkpoint; if it happens again, a device or the program is at fault",
            exit_code=1,
        )
