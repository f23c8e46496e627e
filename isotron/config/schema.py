"""The config of a run: every section's dataclass side by side. PURE.

Sections are TOML tables; leaf names are unique over all sections and are the flags: `layout.tp` is `--tp`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from isotron.core.checkpoint.config import CheckpointConfig
from isotron.core.errors import refuse
from isotron.core.models import (
    bert_config,
    deepseek_moe_config,
    deepseek_v2_config,
    deepseek_v3_config,
    gemma2_config,
    gemma3_config,
    gpt_config,
    gpt_oss_config,
    llama_config,
    mistral_config,
    mixtral_config,
    neox_config,
    olmo2_config,
    phi3_config,
    qwen2_config,
    qwen2_moe_config,
    qwen3_config,
    qwen3_moe_config,
    t5_config,
)
from isotron.core.models.bert_config import BertConfig
from isotron.core.models.deepseek_moe_config import DeepseekMoEConfig
from isotron.core.models.deepseek_v2_config import DeepseekV2Config
from isotron.core.models.deepseek_v3_config import DeepseekV3Config
from isotron.core.models.gemma2_config import Gemma2Config
from isotron.core.models.gemma3_config import Gemma3Config
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.gpt_oss_config import GptOssConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.models.llama_shapes import LlamaShapes
from isotron.core.models.mistral_config import MistralConfig
from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.models.neox_config import NeoXConfig
from isotron.core.models.olmo2_config import Olmo2Config
from isotron.core.models.phi3_config import Phi3Config
from isotron.core.models.qwen2_config import Qwen2Config
from isotron.core.models.qwen2_moe_config import Qwen2MoeConfig
from isotron.core.models.qwen3_config import Qwen3Config
from isotron.core.models.qwen3_moe_config import Qwen3MoeConfig
from isotron.core.models.t5_config import T5Config
from isotron.core.optim.config import OptimConfig
from isotron.core.optim.schedules import ScheduleConfig
from isotron.core.parallel.plan import Layout
from isotron.data.config import DataConfig
from isotron.tokenizers.config import TokenizerConfig
from isotron.train.config import FaultConfig, LogConfig, TrainConfig

ModelConfig = GPTConfig | LlamaShapes | NeoXConfig | T5Config  # most families have LlamaShapes's fields and more
_CLASSES: tuple[type[ModelConfig], ...] = (
    GPTConfig,
    Gemma2Config,
    Gemma3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NeoXConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    DeepseekMoEConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    T5Config,
    BertConfig,
)
MODELS: dict[str, type[ModelConfig]] = {cls.family: cls for cls in _CLASSES}
PRESETS: dict[str, ModelConfig] = {
    **bert_config.PRESETS,
    **deepseek_moe_config.PRESETS,
    **deepseek_v2_config.PRESETS,
    **deepseek_v3_config.PRESETS,
    **gemma2_config.PRESETS,
    **gemma3_config.PRESETS,
    **gpt_config.PRESETS,
    **gpt_oss_config.PRESETS,
    **llama_config.PRESETS,
    **mistral_config.PRESETS,
    **mixtral_config.PRESETS,
    **neox_config.PRESETS,
    **olmo2_config.PRESETS,
    **phi3_config.PRESETS,
    **qwen2_config.PRESETS,
    **qwen2_moe_config.PRESETS,
    **qwen3_config.PRESETS,
    **qwen3_moe_config.PRESETS,
    **t5_config.PRESETS,
}
DEFAULT_FAMILY = "llama"


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes and where it writes."""

    model: ModelConfig = LlamaConfig()
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    layout: Layout = Layout()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    faults: FaultConfig = FaultConfig()


SECTIONS: dict[str, Any] = {f.name: f.default for f in fields(RunConfig)}


def value(config: RunConfig, leaf: str) -> Any:
    """The value of a leaf by name, whatever its section; None when the model family has no such field."""
    for section in SECTIONS:
        part = getattr(config, section)
        if leaf in part.__dataclass_fields__:
            return getattr(part, leaf)
    return None


def changed(config: RunConfig, **leaves: Any) -> RunConfig:
    """The config with some leaves replaced, each found by its name: changed(c, tp=2, hidden_size=64)."""
    for leaf, new in leaves.items():
        for section in SECTIONS:
            part = getattr(config, section)
            if leaf in part.__dataclass_fields__:
                config = replace(config, **{section: replace(part, **{leaf: new})})
                break
        else:
            raise KeyError(f"no option {leaf} in a run with model family {config.model.family}")
    return config


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """{section: {leaf: value}} of plain JSON values; `model` also holds its `family`."""
    plain = {
        section: {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(getattr(config, section)).items()}
        for section in SECTIONS
    }
    plain["model"] = {"family": config.model.family, **plain["model"]}
    return plain


def from_dict(tree: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The config that `to_dict` wrote; leaves it lacks keep their defaults, names it should not have are refused."""
    sections: dict[str, Any] = {}
    for section, table in tree.items():
        if section not in SECTIONS:
            raise refuse(f"config section {section!r}", f"the sections are {', '.join(SECTIONS)}", "leave it out")
        leaves: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        family = leaves.pop("family", DEFAULT_FAMILY) if section == "model" else ""
        if family and family not in MODELS:
            raise refuse(f"model family {family!r}", f"the families are {', '.join(MODELS)}", f"{DEFAULT_FAMILY!r}")
        cls: Any = MODELS[family] if family else type(SECTIONS[section])
        unknown = sorted(set(leaves) - set(cls.__dataclass_fields__))
        if unknown:
            raise refuse(f"config entries {', '.join(unknown)}", f"[{section}] has no such entries", "leave them out")
        sections[section] = cls(**leaves)
    return RunConfig(**sections)


def to_toml(config: RunConfig, provenance: Mapping[str, str] | None = None) -> str:
    """The config as TOML; with `provenance` (leaf -> origin) each line says where its value came from."""
    origin = {} if provenance is None else provenance
    lines = []
    for section, table in to_dict(config).items():
        lines.append(f"[{section}]")
        for leaf, new in table.items():
            text = f"{leaf} = {_toml(new)}"
            lines.append(f"{text:<44} # {origin[leaf]}" if leaf in origin else text)
        lines.append("")
    return "\n".join(lines)


def _toml(new: Any) -> str:
    if isinstance(new, bool):
        return "true" if new else "false"
    if isinstance(new, str):
        return json.dumps(new, ensure_ascii=False)
    if isinstance(new, list):
        return "[" + ", ".join(map(_toml, new)) + "]"
    return repr(new)
