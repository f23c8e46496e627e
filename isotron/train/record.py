"""What one training step was, as it is written down. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """One step.

    loss: per unmasked token. grad_norm: before clipping. tokens: unmasked, over all ranks. consumed_samples: up to and
    with this step. data_wait_s: for the data, before the step. flops_per_s_per_device: model FLOP/s. sample_ids: first
    and last in consumption order. loss_scale: None in types that have none. aux: further terms of the loss, and lists
    such as the visits of each expert.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    consumed_samples: int
    step_time_s: float
    flops_per_s_per_device: float
    skipped: bool
    sample_ids: tuple[int, int]
    data_wait_s: float = 0.0
    loss_scale: float | None = None
    aux: Mapping[str, float | list[int]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Unmasked tokens per second over all ranks."""
        return self.tokens / self.step_time_s

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s of one device."""
        return self.flops_per_s_per_device / 1e12

    @property
    def global_batch_size(self) -> int:
        """Sequences in this step."""
        return self.sample_ids[1] - self.sample_ids[0] + 1
