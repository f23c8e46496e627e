"""Where a model named on the command line lies: a path, or ORG/NAME in the cache of `huggingface_hub`. PURE.

A path that exists is that path. Anything that looks like ORG/NAME or ORG/NAME@REVISION is asked from
`huggingface_hub`, whose cache, token and offline mode (HF_HUB_OFFLINE=1) are respected; only safetensors, configs and
tokenizers are taken.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from isotron.core.errors import refuse
from isotron.hub.folder import COMPANIONS, CONFIG

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)


def is_hub_name(text: str) -> bool:
    """Whether text names a model of the hub rather than a path; runs/frist beside a directory runs is a path."""
    path = Path(text).expanduser()
    return not path.exists() and not path.parent.exists() and NAME.fullmatch(text) is not None


def local_path(text: str) -> Path:
    """The directory of a model; a name of the hub is fetched into its cache first, unless it is there."""
    if not is_hub_name(text):
        return Path(text).expanduser()
    name, _, revision = text.partition("@")
    try:
        library = import_module("huggingface_hub")
    except ImportError as error:
        raise refuse(
            f"--load {text}", f"it needs the package huggingface_hub: {error}", "pip install huggingface_hub"
        ) from error
    patterns = ["*.safetensors", "*.safetensors.index.json", CONFIG, *COMPANIONS]
    try:
        return Path(library.snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (OSError, ValueError, library.errors.HfHubHTTPError) as error:
        case = f"there is no directory {text}, and the hub gave nothing: {str(error).splitlines()[0]}"
        fix = "--load with the path of a directory, or download it where there is a network and set HF_HUB_OFFLINE=1"
        raise refuse(f"--load {text}", case, fix) from error
