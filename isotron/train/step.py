"""One training step, top to bottom: count -> table -> one norm -> clip -> optimizer -> schedules.

Nothing is divided after the backward: the number of unmasked tokens of the whole step is counted first, from data
alone, and every token's loss enters the backward with its final weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotron.core.batch import Batch
from isotron.core.mesh import AXES
from isotron.core.optim.clip import clip_factor, global_norm
from isotron.core.optim.optimizer import Optimizer
from isotron.core.optim.schedules import ScheduleConfig, learning_rate, weight_decay
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.routing import count_visits, described, move_biases, sum_aux
from isotron.core.precision.scaler import LossScaler


@dataclass(frozen=True)
class StepResult:
    """What a step was: loss per token, gradient norm before clipping, learning rate used, global unmasked tokens.

    aux: further terms of the loss, as they are reported.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool
    aux: Mapping[str, Any] = field(default_factory=dict)


def train_step(
    model: ParallelModel,
    optimizer: Optimizer,
    scaler: LossScaler,
    schedule: ScheduleConfig,
    batches: Sequence[Batch],
    admits: Callable[[float, float], bool] = lambda loss, norm: True,
) -> StepResult:
    """Train on this rank's microbatches of one global batch; the same result on every rank.

    `admits(loss, norm)` says whether the step may change weights and optimizer state, and returns when it may: a save
    in the background may still read them. A step that is not finite never does.
    """
    tokens = model.count_tokens(batches)
    count_visits(model, batches)
    terms = model.forward_backward(batches, weight=scaler.scale / max(tokens, 1.0), scale=scaler.scale)
    aux = sum_aux(model, terms)
    (loss,) = model.sum_terms(terms, ["loss"])
    loss /= max(tokens, 1.0)

    norm = global_norm(optimizer.views, model.mesh.group(*AXES), scaler.scale, model.device)
    factor = clip_factor(norm, optimizer.cfg.clip_grad) / scaler.scale
    overflow = not (math.isfinite(norm) and math.isfinite(loss))
    lr = learning_rate(schedule, optimizer.updates)
    applied = admits(loss, norm) and not overflow
    if applied:
        optimizer.step(lr, weight_decay(schedule, optimizer.updates), factor)
        model.gather_weights()
        move_biases(model, aux)
    scaler.update(overflow)
    return StepResult(loss, norm, lr, int(tokens), not applied, described(aux, model.count_rows(batches), tokens))
