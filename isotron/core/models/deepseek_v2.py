"""DeepSeek-V2: built like V3; what differs is in the configuration, `deepseek_v2_config.py`."""

from __future__ import annotations

from isotron.core.models.deepseek_v3 import build

__all__ = ["build"]
