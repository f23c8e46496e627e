"""Loss scaling for float16, with Megatron's rule.

The scale doubles after `loss_scale_window` clean steps. Each overflow uses up one unit of hysteresis; once it is used
up, every further overflow halves the scale, down to the floor. Hysteresis is restored only when the scale grows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from isotron.core.optim.config import OptimConfig


@dataclass
class LossScaler:
    """`scale` multiplies the loss; `clean` and `patience` are the counters behind it."""

    scale: float
    floor: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    dynamic: bool = True
    clean: int = 0
    patience: int | None = None  # None: as much as `hysteresis`; 0 is a state of its own

    def __post_init__(self) -> None:
        self.scale, self.clean = float(self.scale), int(self.clean)
        self.patience = self.hysteresis if self.patience is None else int(self.patience)

    @staticmethod
    def for_run(dtype: str, cfg: OptimConfig) -> LossScaler:
        """Dynamic for float16 unless a scale is given; 1 for every other type."""
        if dtype != "float16":
            return LossScaler(1.0, dynamic=False)
        if cfg.loss_scale:
            return LossScaler(cfg.loss_scale, dynamic=False)
        return LossScaler(cfg.initial_loss_scale, cfg.min_loss_scale, cfg.loss_scale_window, cfg.hysteresis)

    @property
    def can_fall(self) -> bool:
        """Whether an overflow is still a search for the scale."""
        return self.dynamic and self.scale > self.floor

    def update(self, overflow: bool) -> None:
        """Take in whether this step's gradients overflowed."""
        if not self.dynamic:
            return
        if overflow:
            self.clean = 0
            self.patience = (self.patience or 0) - 1
            if self.patience <= 0:
                self.scale = max(self.scale * 0.5, self.floor)
            return
        self.clean += 1
        if self.clean >= self.window:
            self.clean, self.patience = 0, self.hysteresis
            self.scale *= 2.0

    def go_on_from(self, saved: LossScaler) -> None:
        """Take over where a saved scale stood; floor, window and hysteresis stay those asked for now."""
        if self.dynamic and saved.dynamic:
            self.scale, self.clean = max(saved.scale, self.floor), saved.clean
            self.patience = min(saved.patience or 0, self.hysteresis)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return asdict(self)
