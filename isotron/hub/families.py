"""Which model families exist in Hugging Face's spelling, by their name here and by `model_type`. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from isotron.core.errors import refuse
from isotron.core.models.hf_names import Mapped

FAMILIES = (
    "bert",
    "deepseek_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gemma2",
    "gemma3",
    "gpt",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "neox",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "t5",
)


class Spelling(Protocol):
    """What a module `<family>_hf` offers."""

    CONFIG: type[Any]
    MODEL_TYPE: str
    ARCHITECTURE: str
    PREFIX: str  # begins the names of all tensors but the head; missing in files of a model without head
    HEAD: str
    EMBEDDING: str
    IGNORED: tuple[str, ...]  # names of what is stored but follows from the config

    def read_config(self, values: Mapping[str, Any], where: str) -> Any:
        """Their fields -> our config."""

    def write_config(self, cfg: Any) -> dict[str, Any]:
        """Our config -> their fields."""

    def tensors(self, cfg: Any) -> list[Mapped]:
        """Every tensor, ours and theirs."""


@cache
def spelling_of(family: str) -> Spelling:
    """The spelling of a family of ours."""
    if family not in FAMILIES:
        raise refuse(
            f"model family {family!r} in Hugging Face's format",
            f"the families are {', '.join(FAMILIES)}",
            "one of them",
        )
    found: Any = import_module(f"isotron.core.models.{family}_hf")
    return found  # type: ignore[no-any-return]


def spelling_of_type(model_type: str, where: str) -> Spelling:
    """The spelling for a `model_type` of config.json."""
    known = {spelling_of(f).MODEL_TYPE: spelling_of(f) for f in FAMILIES}
    if model_type not in known:
        case = f"its config.json has model_type {model_type!r}, isotron knows {', '.join(sorted(known))}"
        raise refuse(where, case, "a model of one of these types")
    return known[model_type]


def model_from_dict(table: Mapping[str, Any]) -> Any:
    """A model config from its JSON form, which also holds its `family`."""
    leaves = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    return spelling_of(leaves.pop("family", "llama")).CONFIG(**leaves)
