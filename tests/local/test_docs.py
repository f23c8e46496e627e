"""The README and the pages of docs/: every command in a `sh` block runs, with small sizes; tables say what is there.

Commands of a page run in order in one scratch directory, the README's first: other pages may use the runs that it
makes. `isotron` runs in this process, which saves the start of one; scripts run as they stand. Lines for a cluster run
with --print-config, as the first process of the world that they ask for. Blocks without a language are not run.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isotron import cli
from isotron.launch import close_all

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("model", "layout", "randomness", "deepspeed", "data", "zero")  # pages whose Python no other test runs

TRAIN = ["--train-iters", "2", "--eval-iters", "1", "--log-interval", "10", "--no-tensorboard"]
RESUME = ["--train-iters", "4", "--eval-iters", "1", "--log-interval", "10", "--no-tensorboard"]
GENERATE = ["--max-new-tokens", "3"]
# a cluster's paths are not ours: made-up data, the tokenizers of this repository
CLUSTER = {
    "configs/llama3-8b.toml": ["--tokenizer-type", "auto", "--tokenizer-model", "assets/demo_tokenizer/tokenizer.json"],
    "configs/gpt-175b.toml": ["--vocab-file", "assets/gpt2/vocab.json", "--merge-file", "assets/gpt2/merges.txt"],
}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language ("" for none)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [text for named, text in found if named == language]


def commands(page: Path) -> list[str]:
    """The commands of a page, lines that end in a backslash joined."""
    text = "".join(blocks(page, "sh")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


RUNNABLE = [page for page in PAGES if commands(page)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory like the repository's root, with a smaller text."""
    place = tmp_path_factory.mktemp("docs")
    for name in ("configs", "examples"):
        (place / name).symlink_to(ROOT / name)
    (place / "assets" / "text").mkdir(parents=True)
    for name in ("demo_tokenizer", "gpt2"):
        (place / "assets" / name).symlink_to(ROOT / "assets" / name)
    for part in ("train", "valid"):
        lines = (ROOT / "assets" / "text" / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()[:40]
        (place / "assets" / "text" / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (place / "prompts.txt").write_text("The king\nAnd\n", encoding="utf-8")
    yield place
    close_all()  # `isotron verify` keeps its workers for the next time


# ---- running ---------------------------------------------------------------------------------------------------------


def shorter(words: list[str]) -> list[str]:
    """What is appended to a command so that it takes a second; the last occurrence of an option wins."""
    if "generate" in words or any("text_generation" in w for w in words):
        return GENERATE
    if "tokenizer" in words:
        return []
    if "train" in words or any("pretrain" in w for w in words):
        fewer = ["--global-batch-size", "16"] if "configs/demo.toml" in words else []
        return [*(RESUME if "--load" in words else TRAIN), *fewer]
    return []


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run one command of a page; returns its exit code."""
    words = shlex.split(command)
    if words[0] in ("torchrun", "srun"):
        return run_on_cluster(words, monkeypatch)
    if words[0] == "isotron":
        if "<" in words:
            at = words.index("<")
            monkeypatch.setattr("sys.stdin", io.StringIO(Path(words[at + 1]).read_text()))
            del words[at : at + 2]
        return cli.main([*words[1:], *shorter(words)])
    program = sys.executable if words[0] == "python" else words[0]
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return subprocess.run([program, *words[1:], *shorter(words)], env=env, check=False).returncode


def run_on_cluster(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The first process of the world that the launcher would start, as far as --print-config."""
    nodes, each = (int(words[words.index(o) + 1]) for o in words if o in ("--nodes", "--nnodes", *_EACH))
    for name, value in {"RANK": 0, "WORLD_SIZE": nodes * each, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": each}.items():
        monkeypatch.setenv(name, str(value))
    rest = words[words.index("train") :]
    own = CLUSTER[rest[rest.index("--config") + 1]]
    if not Path("data/train_text_document.idx").exists():
        text = ["--input", "assets/text/valid.jsonl", "--output-prefix", "data/train"]
        assert cli.main(["preprocess", *text, "--tokenizer-model", "assets/demo_tokenizer/tokenizer.json"]) == 0
    return cli.main([*rest, *own, "--data-path", "data/train", "--device", "cpu", "--print-config"])


_EACH = ("--ntasks-per-node", "--nproc-per-node")


# what other pages use, and a file by which it is known to be there
OF_README = {"runs/first": "runs/first", "data/train": "data/train_text_document.idx"}


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda p: p.stem)
def test_the_commands_of_a_page_run(page: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [name for name, file in OF_README.items() if not (scratch / file).exists()]
    if page != README and any(name in "".join(commands(page)) for name in missing):
        pytest.skip("the README's commands make what this page uses")
    monkeypatch.chdir(scratch)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for command in commands(page):
        must_fail = command.startswith("! ")
        with monkeypatch.context() as patch:
            code = run(command.removeprefix("! "), patch)
        assert (code == 1) if must_fail else (code == 0), f"exit code {code}: {command}"


@pytest.mark.parametrize("name", OURS)
def test_the_python_of_a_page_runs(name: str) -> None:
    page = ROOT / "docs" / f"{name}.md"
    found = blocks(page, "python")
    assert found
    for code in found:
        exec(compile(code, str(page), "exec"), {})


# ---- what the pages say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_no_isotron_command_hides_from_the_test(page: Path) -> None:
    hidden = [line for text in blocks(page, "") for line in text.splitlines() if line.startswith("isotron ")]
    assert not hidden, "commands stand in sh blocks"


def test_the_table_of_verbs_is_that_of_the_command() -> None:
    text = README.read_text(encoding="utf-8")
    assert re.findall(r"^\| `isotron (\w+)` \|", text, re.M) == list(cli.VERBS)
    named = re.search(r"^- The verb `(\w+)`", text.replace("\n  ", " "), re.M)
    assert named is not None and [named[1]] == list(cli.NOT_BUILT)


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == {p.stem for p in PAGES[1:]} - {"README"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_make_targets_and_options_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    asked = {t for page in PAGES for t in re.findall(r"\bmake ([a-z]+)\b", page.read_text(encoding="utf-8"))}
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    assert {"demo", "test", "check"} <= asked & targets
    unknown = {t for page in PAGES for block in blocks(page, "") for t in re.findall(r"^make (\w+)", block, re.M)}
    assert unknown <= targets
