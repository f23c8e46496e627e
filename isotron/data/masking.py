"""Which data a model family learns from: text as it is, rows with masked words, or pairs with masked spans. PURE."""

from __future__ import annotations

from typing import Any, Protocol

from isotron.data.config import DataConfig
from isotron.data.spans import span_masking
from isotron.data.words import word_masking
from isotron.tokenizers.base import Tokenizer


class Masking(Protocol):
    """How stretches of text become samples."""

    @property
    def text(self) -> int:
        """Tokens of a stretch."""
        ...

    def dataset(self, texts: Any, seed: int, part: int) -> Any:
        """Samples from a dataset of stretches; `part` 0 is training, 1 validation."""
        ...


def masking(config: DataConfig, model: Any, tokenizer: Tokenizer | None) -> Masking | None:
    """How the data of a run are masked; None for a family that reads text as it is."""
    if getattr(model, "two_streams", False):
        return span_masking(config, model, tokenizer)
    return None if getattr(model, "causal", True) else word_masking(config, model, tokenizer)
