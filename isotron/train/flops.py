"""Model FLOPs of a training step, counted from the shapes in the layout table. PURE.

Counted are the matrix products that the mathematics of the model asks for: forward, gradient of the input, gradient of
the weight, 2 FLOPs per multiply-add. Norms, activations, softmax and look-ups are left out (well below 1% in real
models), and so is what an implementation does on top: recomputed activations, scores formed again by a fused attention
kernel, padding of the vocabulary. The figure therefore depends on the model and the batch, never on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Protocol

from isotron.core.layout import Table

# tables that are read by index: no matrix product
LOOKUPS = frozenset({"embed.weight", "positions.weight", "types.weight"})
FORWARD_AND_BACKWARD = 3  # the backward has two products for each one of the forward


class ModelShapes(Protocol):
    """What every family's config has."""

    @property
    def num_layers(self) -> int:
        """Blocks."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """H: query heads."""
        ...

    @property
    def head_size(self) -> int:
        """N: width of one head."""
        ...

    @property
    def vocab_size(self) -> int:
        """Real vocabulary entries."""
        ...

    def layout(self, padded_vocab: int) -> Table:
        """Parameter names -> shapes."""
        ...


def step_flops(config: ModelShapes, tokens_per_step: int, sequence: int, causal: bool = True) -> float:
    """FLOPs of forward and backward over `tokens_per_step` positions in sequences of `sequence` positions.

    Grouped queries, gated MLPs and the output layer follow from the table. Attention is counted causally: a position
    meets itself and what came before, (sequence + 1) / 2 keys on average; documents isolated inside a sequence would
    make it less and are not looked at. `causal=False` counts the full square, as torch's counter and many published
    utilisation figures do. An encoder's always is. It reads sequences of `sequence` positions, a decoder beside
    it its own rows.
    """
    pairs = getattr(config, "multiplications", None)
    if pairs is not None:
        each, output = pairs(sequence, causal)
        return float(2 * FORWARD_AND_BACKWARD * tokens_per_step / sequence * (sum(map(sum, each)) + output))
    context = (sequence + 1) / 2 if causal and getattr(config, "causal", True) else sequence
    heads = config.head_size + getattr(config, "v_head_dim", config.head_size)  # scores, then values
    attention = 2 * config.num_attention_heads * heads * context
    per_token = 2 * matrix_elements(config) + config.num_layers * attention
    return float(FORWARD_AND_BACKWARD * tokens_per_step * per_token)


def matrix_elements(config: ModelShapes) -> float:
    """Elements of all matrices that a token is multiplied with; a tied output layer counts, look-up tables do not.

    Of experts a token meets those that it visits.
    """
    total = 0.0
    visited: Callable[[str], float] = getattr(config, "visited", lambda pattern: 1.0)
    for rule in config.layout(config.vocab_size).rules:
        if rule.pattern in LOOKUPS or len(rule.shape) < 2:
            continue
        if len(rule.shape) > 2:
            raise ValueError(f"how many of {rule.pattern} {rule.shape} one token meets does not follow from its shape")
        blocks = config.num_layers if rule.pattern.startswith("layers.*") else 1
        total += prod(rule.shape) * visited(rule.pattern) * blocks
    return total


def flops_per_device(flops: float, seconds: float, world: int) -> float:
    """FLOP/s of one of `world` devices that did `flops` together in `seconds`."""
    return flops / seconds / world


def utilisation(flops_per_s_per_device: float, peak: float | None) -> float | None:
    """Model FLOP utilisation (MFU), as a fraction of `peak` FLOP/s; None where the peak is not known."""
    return flops_per_s_per_device / peak if peak else None
