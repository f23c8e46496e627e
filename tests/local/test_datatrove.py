"""The example of a datatrove pipeline that writes token files; skipped where datatrove is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.datatrove_tokens import long_enough, token_files
from isotron.data.partitions import join
from isotron.data.preprocess import preprocess
from isotron.tokenizers.build import build_tokenizer
from isotron.tokenizers.config import TokenizerConfig

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "assets" / "demo_tokenizer")
TEXTS = [f"document {i} of a folder of files, {'long ' * (i % 7)}" if i % 5 else "short" for i in range(40)]


def wanted(folder: Path, texts: list[str]) -> tuple[bytes, bytes]:
    path = folder / "wanted.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_model=MODEL))
    preprocess([path], folder / "wanted", tokenizer, append_eod=True, workers=1, log=lambda _: None)
    return pair(folder / "wanted")


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}_text_document.bin").read_bytes(), Path(f"{prefix}_text_document.idx").read_bytes()


def test_the_parts_of_a_step_are_joined(tmp_path: Path) -> None:
    """As any executor calls it: a task for each part, one of them without a document, another one run again."""
    tasks = [TEXTS[:15], [], TEXTS[15:]]
    for rank, texts in [*enumerate(tasks), (0, tasks[0])]:
        documents = [SimpleNamespace(text=text) for text in texts]
        step = token_files(documents, rank, 3, prefix=str(tmp_path / "ours"), tokenizer_model=MODEL)
        assert list(step) == documents
    join(tmp_path / "ours", 3, ["text_document"])
    assert pair(tmp_path / "ours") == wanted(tmp_path, TEXTS)


def test_a_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("datatrove", reason="datatrove is not installed: its pipeline is not run")
    (tmp_path / "raw").mkdir()
    for i in range(2):
        lines = [json.dumps({"text": t, "id": str(n)}) + "\n" for n, t in enumerate(TEXTS[20 * i : 20 * i + 20])]
        (tmp_path / "raw" / f"{i}.jsonl").write_text("".join(lines))
    words = ["--input-folder", "raw", "--output-prefix", "ours", "--tokenizer-model", MODEL, "--tasks", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    program = [sys.executable, str(ROOT / "examples" / "datatrove_tokens.py"), *words]
    subprocess.run(program, cwd=tmp_path, env=env, check=True)
    kept = [text for text in TEXTS if long_enough(SimpleNamespace(text=text))]
    assert len(kept) == 32 and pair(tmp_path / "ours") == wanted(tmp_path, kept)
