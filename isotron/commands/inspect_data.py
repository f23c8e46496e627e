"""What token files hold: documents, tokens, types, lengths, and the beginnings of some documents, decoded."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isotron.config.catalogue import Option, catalogue

SAMPLES = {"samples": Option("samples", "int", 3, "documents of a data set whose beginning is shown")}
TOKENIZER = {n: o for n, o in catalogue().items() if o.section == "tokenizer" or n == "vocab_size"}


def is_data(path: str) -> bool:
    """Whether the path is a prefix of token files, or a directory with some."""
    stem = path[:-4] if path.endswith((".bin", ".idx")) else path
    places = (Path(stem + ".idx"), Path(stem + "_text_document.idx"))
    return any(p.is_file() for p in places) or (Path(path).is_dir() and any(Path(path).glob("*.idx")))


def show_data(path: str, flags: dict[str, Any]) -> int:
    """Documents, tokens, lengths and samples of each pair that the path names."""
    from isotron.data.blend import find_prefixes
    from isotron.data.describe import describe
    from isotron.tokenizers.build import build_tokenizer
    from isotron.tokenizers.config import TokenizerConfig

    fields = {n: flags[n] for n in TokenizerConfig.__dataclass_fields__}
    given = any(fields[n] for n in ("tokenizer_model", "vocab_file"))
    tokenizer = build_tokenizer(TokenizerConfig(**fields), flags["vocab_size"]) if given else None
    found = [describe(p, tokenizer, max(flags["samples"], 0)) for p in find_prefixes(path, "isotron inspect")]
    if flags["json"]:
        print(json.dumps([asdict(one) for one in found]))
    else:
        print("\n".join(line for one in found for line in one.lines()))
    return 0
