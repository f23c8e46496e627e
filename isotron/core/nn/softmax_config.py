"""Attention's softmax as an option: with one more key that has a score and no value, or without. PURE.

A family that has the choice inherits this field; `attention.py` computes with it. Sources: Miller 2023 (softmax off by
one); Xiao et al. 2023 (attention sinks); OpenAI 2025 (gpt-oss: a learned score per head).
"""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.layout import Part, Rule, Split
from isotron.core.options import option

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig:
    """Fields of families with the choice."""

    softmax_type: str = option(
        "vanilla",
        "attention's softmax: off-by-one adds 1 to the sum of exponentials, learnable a number per head (a sink)",
        choices=SOFTMAX_TYPES,
    )

    def sink_rules(self, heads: int) -> tuple[Rule, ...]:
        """The layout of the learned scores, which begin as off-by-one; without them nothing."""
        split = Split(0, (Part(heads),))
        rule = Rule("layers.*.attention.sinks", (heads,), split, "heads", init="zeros", decay=False)
        return (rule,) if self.softmax_type == "learnable" else ()
