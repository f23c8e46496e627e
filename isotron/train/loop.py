"""The training loop: asks for each step's microbatches, takes the step, and hangs everything else on it.

One step is `step.py`. Around it: metrics, checks, evaluation, checkpoints, and the decision to stop, which all ranks
take together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotron.core import device as devices
from isotron.core.errors import refuse
from isotron.core.parallel.replicas import unequal_replicas
from isotron.data.batches import Prefetcher, microbatches
from isotron.train.faults import EXIT_OK, EXIT_SIGNALLED, FiniteGuard, StopSignal, Watchdog
from isotron.train.flops import step_flops
from isotron.train.metrics import Metrics, StepRecord
from isotron.train.saving import Saves
from isotron.train.state import TrainState
from isotron.train.step import StepResult, train_step
from isotron.train.timeline import StepTracer


@dataclass
class Run:
    """A state in progress with what feeds it, where it is saved and what it reports to."""

    state: TrainState
    train_data: Sequence[Any]
    valid_data: Sequence[Any] | None
    eod: int | None
    saves: Saves
    metrics: Metrics
    stop: StopSignal
    watchdog: Watchdog
    guard: FiniteGuard

    def batches(self, data: Sequence[Any], consumed: int) -> list[Any]:
        """This rank's microbatches of the global batch that starts at sample `consumed`, on its device."""
        cfg, mesh = self.state.config, self.state.model.mesh
        dp = mesh.group("dp")
        found = microbatches(
            data,
            consumed,
            cfg.train.global_batch_size,
            cfg.train.micro_batch_size,
            dp.index,
            dp.size,
            cfg.data,
            self.eod,
        )
        return [b.to(self.state.model.device) for b in found]


def train(run: Run) -> int:
    """Train to `train_iters`; returns the exit code. A checkpoint of the last step is always written."""
    state, cfg = run.state, run.state.config
    size, first = cfg.train.global_batch_size, state.consumed_samples
    if state.step >= cfg.train.train_iters:
        run.metrics.say(f"isotron: already at step {state.step} of {cfg.train.train_iters}; raise --train-iters")
    remaining = range(first, first + (cfg.train.train_iters - state.step) * size, size)
    tracer = StepTracer(state.model, cfg.log.trace, Path(cfg.log.run_dir or run.saves.directory))
    with Prefetcher(run.batches(run.train_data, consumed) for consumed in remaining) as feed:
        for batches in feed:
            with tracer.step(state.step + 1, len(batches)):
                one_step(run, batches)
            stop, failed = run.stop.agreed_with(run.saves.failing(), state.ranks.group)
            run.saves.look(failed)
            if stop:
                return stopped(run)
            if _due(state.step, cfg.checkpoint.save_interval) or state.step == cfg.train.train_iters:
                save(run)
            if run.valid_data is not None and _due(state.step, cfg.train.eval_interval) and evaluate(run) is None:
                return stopped(run)
    run.saves.save_last()
    if run.valid_data is not None and not _due(state.step, cfg.train.eval_interval) and evaluate(run) is None:
        return stopped(run)
    run.guard.end()
    run.metrics.event("finished")
    return EXIT_OK


def stopped(run: Run) -> int:
    """End as a signal asked: with a checkpoint of the last step."""
    run.saves.save_last()
    run.metrics.event("stopped", signal=run.stop.name)
    return EXIT_SIGNALLED


def one_step(run: Run, batches: Sequence[Any]) -> None:
    """Take a step and report it."""
    state, cfg = run.state, run.state.config
    started = time.perf_counter()
    scale = state.scaler.scale
    result = train_step(state.model, state.optimizer, state.scaler, state.schedule, batches, run.saves.wait_staged)
    devices.synchronize(state.model.device)
    seconds = time.perf_counter() - started
    state.step += 1
    first = state.consumed_samples
    state.consumed_samples += cfg.train.global_batch_size
    state.skipped += result.skipped
    run.watchdog.beat(state.step)
    run.metrics.step(_record(run, result, seconds, scale, first))
    scale_can_fall = state.scaler.dynamic and state.scaler.scale > state.scaler.floor
    run.guard.check(result.loss, result.grad_norm, result.skipped, state.step, scale_can_fall)
    if _due(state.step, cfg.train.check_interval):
        _check_replicas(state)


def _record(run: Run, result: StepResult, seconds: float, scale: float, first: int) -> StepRecord:
    state, cfg = run.state, run.state.config
    positions = cfg.train.global_batch_size * cfg.data.seq_length
    flops = step_flops(cfg.model, positions, cfg.data.seq_length) / seconds / state.model.mesh.size
    return StepRecord(
        step=state.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        tokens=result.tokens,
        consumed_samples=state.consumed_samples,
        step_time_s=seconds,
        flops_per_s_per_device=flops,
        skipped=result.skipped,
        sample_ids=(first, state.consumed_samples - 1),
        aux=result.aux,
        loss_scale=scale if cfg.train.dtype == "float16" else None,
    )


def save(run: Run) -> None:
    """Write a checkpoint, or begin to."""
    run.saves.save()


def evaluate(run: Run) -> float | None:
    """Loss per token on the first `eval_iters` global batches of the validation data, the same on every rank.

    None when all ranks were told to stop meanwhile: whoever sends the signal does not wait for an evaluation.
    """
    state, cfg = run.state, run.state.config
    total, tokens, started = 0.0, 0, time.perf_counter()
    with run.watchdog.phase("evaluation"):
        for i in range(cfg.train.eval_iters):
            batches = run.batches(run.valid_data or (), i * cfg.train.global_batch_size)
            terms = state.model.evaluate(batches)
            total += state.model.sum_terms(terms, ["loss"])[0]
            tokens += int(state.model.count_tokens(batches))
            run.watchdog.beat(state.step)
            if run.stop.agreed(state.ranks.group):
                return None
    loss = total / max(tokens, 1)
    run.metrics.evaluation(state.step, "valid", loss, tokens, time.perf_counter() - started)
    return loss


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _check_replicas(state: TrainState) -> None:
    differing = unequal_replicas(state.model)
    if differing:
        raise refuse(
            f"weights that are equal on all ranks at step {state.step}",
            f"these differ between ranks: {', '.join(differing)}",
            "resume from the last checkpoint; if it happens again, a device or the program is at fault",
            exit_code=1,
        )
