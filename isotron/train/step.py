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

    @property
    def overflow(self) -> bool:
        """Whether loss or gradient norm is no finite number."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


def train_step(
    model: ParallelModel,
    optimizer: Optimizer,
    schedule: ScheduleConfig,
    batches: Sequence[Batch],
    scale: float = 1.0,
    admits: Callable[[float, float], bool] = lambda loss, norm: True,
) -> StepResult:
    """Train on this rank's microbatches of one global batch; the same result on every rank.

    `scale` multiplies the loss on its way through the backward and is divided out of norm and update; that of float16
    is a `LossScaler`'s, which hears of the result afterwards.

    `admits(loss, norm)` says whether the step may change weights and optimizer state, and returns when it may: a save
    in the background may still read them. A step that is not finite never does.
    """
    tokens = model.count_tokens(batches)
    count_visits(model, batches)
    terms = model.forward_backward(batches, weight=scale / max(tokens, 1.0), scale=scale)
    aux = sum_aux(model, terms)
    (loss,) = model.sum_terms(terms, ["loss"])
    loss /= max(tokens, 1.0)

    norm = global_norm(optimizer.views, model.mesh.group(*AXES), scale, model.device)
    factor = clip_factor(norm, optimizer.cfg.clip_grad) / scale
    lr = learning_rate(schedule, optimizer.updates)
    applied = admits(loss, norm) and math.isfinite(loss) and math.isfinite(norm)
    if applied:
        optimizer.step(lr, weight_decay(schedule, optimizer.updates), factor)
        model.gather_weights()
        move_biases(model, aux)
    return StepResult(loss, norm, lr, int(tokens), not applied, described(aux, model.count_rows(batches), tokens))
