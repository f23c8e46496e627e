"""The optimizer under its first name."""

from __future__ import annotations

from isotron.core.optim.optimizer import Optimizer as AdamW

__all__ = ["AdamW"]
