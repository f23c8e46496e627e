"""Checkpoints on other storage: order, pruning, damage, and a run that saves there and resumes from there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from isotron import cli
from isotron.core.checkpoint.remote import fetch, is_remote, push, try_remote
from isotron.core.errors import Refused
from tests.local.test_checkpoint import load_all, same, save_one, values

URL = "memory://bucket/run"


def training(address: str) -> list[str]:
    """The words of a tiny run that also keeps its checkpoints at an address."""
    return (
        "train --mock-data --num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 11 --seq-length 8 "
        f"--device cpu --eval-iters 0 --no-tensorboard --remote-save {address}"
    ).split()


@pytest.fixture
def storage() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


def pushed(tmp_path: Path, steps: tuple[int, ...], **keep: int) -> dict[int, Any]:
    saved = {}
    for step in steps:
        saved[step] = {"w": values((8, 3), seed=step)}
        push(save_one(tmp_path / "run", step, saved[step], extra_files={"t/x": b"y"}), URL, **keep)
    return saved


def test_what_is_pushed_comes_back(tmp_path: Path, storage: Any) -> None:
    saved = pushed(tmp_path, (1, 2))
    assert is_remote(URL) and not is_remote("runs/first")
    found = fetch(URL, tmp_path / "cache", print)
    assert found == tmp_path / "cache" / "step_00000002" and same(load_all(found), saved[2])
    before = (found / "rank_00000.safetensors").stat().st_mtime_ns
    assert fetch(URL, tmp_path / "cache", print) == found
    assert (found / "rank_00000.safetensors").stat().st_mtime_ns == before
    one = fetch(f"{URL}/step_00000001", tmp_path / "cache", print)
    assert one is not None and same(load_all(one), saved[1])
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["step_00000001", "step_00000002"]
    assert fetch("memory://bucket/none", tmp_path / "cache", print) is None


def names(storage: Any) -> set[str]:
    return {p.rpartition("/")[2] for p in storage.ls("/bucket/run", detail=False)}


@pytest.mark.parametrize(
    ("steps", "keep", "left"),
    [
        ((2, 3, 4, 5), {"keep_last": 2, "keep_every": 2}, {2, 3, 4, 5}),
        ((2, 3, 4, 5), {"keep_last": 1, "keep_every": 4}, {4, 5}),
        ((2, 3), {"keep_last": 1}, {3}),
        ((2, 3), {}, {2, 3}),
        ((2, 7, 3), {"keep_last": 2}, {7, 3}),  # a run that went back
    ],
)
def test_pruning_there_is_as_on_a_disk(tmp_path: Path, storage: Any, steps: Any, keep: Any, left: set[int]) -> None:
    pushed(tmp_path, steps, **keep)
    for step in steps:
        save_one(tmp_path / "disk", step, {"w": values((8, 3))}, **keep)
    assert names(storage) == {p.name for p in (tmp_path / "disk").iterdir()}
    assert names(storage) == {"latest", *(f"step_{n:08d}" for n in left)}
    assert storage.cat_file("/bucket/run/latest") == (tmp_path / "disk" / "latest").read_bytes()


def test_a_torn_copy_is_never_taken(tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off before the manifest, then with a flipped bit: the step before is taken, and a line says so."""
    saved = pushed(tmp_path, (1,))
    put, said = type(storage).put_file, list[str]()

    def failing(self: Any, source: str, target: str, **rest: Any) -> None:
        if target.endswith("manifest.json"):
            raise OSError("the connection was lost")
        put(self, source, target, **rest)

    monkeypatch.setattr(type(storage), "put_file", failing)
    for step in (2, 9):
        with pytest.raises(Refused, match="connection was lost"):
            pushed(tmp_path, (step,))
    monkeypatch.undo()
    found = fetch(URL, tmp_path / "cache", said.append)
    assert found is not None and same(load_all(found), saved[1]) and not said
    pushed(tmp_path, (3,))  # what was cut off before it is gone; another one may still be on its way
    assert names(storage) == {"latest", "step_00000001", "step_00000003", "step_00000009"}
    name = "/bucket/run/step_00000003/rank_00000.safetensors"
    data = bytearray(storage.cat_file(name))
    data[-1] ^= 1
    storage.pipe_file(name, bytes(data))
    found = fetch(URL, tmp_path / "cache", said.append)
    assert found is not None and found.name == "step_00000001" and "expected SHA-256" in said[0]
    storage.rm("/bucket/run/step_00000001", recursive=True)
    with pytest.raises(Refused, match="expected SHA-256"):
        fetch(URL, tmp_path / "cache", said.append)


class HttpError(Exception):
    """As storage clients have them: no OSError."""


def failing(*_: Any, **__: Any) -> Any:
    raise HttpError("503 from the storage")


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        ("exists", {"push", "fetch", "try"}),  # making a directory in memory asks for it
        ("ls", {"push", "fetch"}),
        ("info", {"push"}),
        ("makedirs", {"push", "try"}),
        ("put_file", {"push"}),
        ("pipe_file", {"push", "try"}),
        ("rm", {"push", "try"}),
        ("get_file", {"fetch"}),
    ],
)
def test_a_storage_fails_in_three_lines_whatever_its_errors_are(
    tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch, call: str, refused: set[str]
) -> None:
    """Each use that needs the call, and no other."""
    pushed(tmp_path, (1,))
    monkeypatch.setattr(type(storage), call, failing)
    uses: dict[str, Callable[[], object]] = {
        "push": lambda: pushed(tmp_path, (2,), keep_last=1),
        "fetch": lambda: fetch(URL, tmp_path / "cache", print),
        "try": lambda: try_remote(URL),
    }
    met = set()
    for name, use in uses.items():
        try:
            use()
        except Refused as refusal:
            met.add(name)
            assert "HttpError: 503 from the storage" in str(refusal)
    assert met == refused


def test_only_steps_that_are_taken_are_asked_for(tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load costs as many requests after a thousand steps as after one."""
    pushed(tmp_path, (1, 2, 3))
    asked, exists = list[str](), type(storage).exists
    monkeypatch.setattr(type(storage), "exists", lambda self, path: asked.append(path) or exists(self, path))
    found = fetch(URL, tmp_path / "cache", print)
    assert found is not None and found.name == "step_00000003"
    assert [path for path in asked if path.endswith(".json")] == ["/bucket/run/step_00000003/manifest.json"]


@pytest.mark.parametrize("words", [[], ["--async-save"]], ids=["waits", "in the background"])
def test_a_copy_that_fails_is_reported_and_no_more(
    tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    put, tries = type(storage).put_file, iter(range(99))
    monkeypatch.setattr(type(storage), "put_file", lambda *a: failing() if next(tries) == 0 else put(*a))
    assert (
        cli.main([*training(URL), "--train-iters", "2", "--save-interval", "1", "--save", str(tmp_path), *words]) == 0
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (why,) = [line["why"] for line in lines if line.get("event") == "copy_failed"]
    assert why == "the storage says: HttpError: 503 from the storage"
    assert names(storage) == {"latest", "step_00000002"}


@pytest.mark.parametrize("words", [[], ["--async-save"]], ids=["waits", "in the background"])
def test_a_step_that_is_being_copied_stays(
    tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Each copy goes on until the next step has been saved, of which one is kept."""
    put = type(storage).put_file

    def slow(self: Any, source: str, target: str) -> None:
        step, end = int(Path(source).parent.name[5:]), time.monotonic() + 20
        while step < 3 and not (tmp_path / f"step_{step + 1:08d}").exists():
            assert time.monotonic() < end
            time.sleep(0.001)
        put(self, source, target)

    monkeypatch.setattr(type(storage), "put_file", slow)
    given = ["--train-iters", "3", "--save-interval", "1", "--keep-last", "1", "--save", str(tmp_path), *words]
    assert cli.main([*training(URL), *given]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["path"][-1] for line in lines if line.get("event") == "copied"] == ["1", "2", "3"]
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_00000003"]
    assert names(storage) == {"latest", "step_00000003"}


def test_a_place_is_tried_before_it_is_needed(tmp_path: Path, storage: Any) -> None:
    for address in (URL, f"file://{tmp_path}/new/run"):
        try_remote(address)
    assert storage.ls("/bucket/run") == [] and list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").touch()
    for address, case in (("memory://", "names no bucket"), (f"file://{tmp_path}/file/run", "can be written there")):
        with pytest.raises(Refused, match=case):
            try_remote(address)


def test_an_address_without_its_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="this address cannot be opened"):
        fetch("nosuch://bucket/run", tmp_path, print)


def test_a_run_saves_there_and_goes_on_from_there(
    tmp_path: Path, storage: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [*training(URL), "--keep-last", "1", "--save-interval", "1"]
    assert cli.main([*words, "--train-iters", "2", "--save", str(tmp_path / "a")]) == 0
    assert storage.cat_file("/bucket/run/latest") == b"step_00000002\n"
    assert cli.main([*words, "--train-iters", "3", "--load", URL, "--save", str(tmp_path / "b")]) == 0
    assert "at step 2, 2 samples consumed" in capsys.readouterr().out
    lines = map(json.loads, (tmp_path / "b" / "metrics.jsonl").read_text().splitlines())
    assert [r["step"] for r in lines if "loss" in r] == [3]
    assert storage.cat_file("/bucket/run/latest") == b"step_00000003\n"
    assert (
        cli.main([*words, "--train-iters", "3", "--load", "memory://bucket/typo", "--save", str(tmp_path / "c")]) == 2
    )
    assert "must not train from scratch" in capsys.readouterr().err


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a bucket of an S3 server on this machine."""
    server = pytest.importorskip("moto.server", reason="an S3 server needs: pip install 'moto[server]' s3fs")
    pytest.importorskip("s3fs", reason="an S3 server needs: pip install 'moto[server]' s3fs")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in (("ACCESS_KEY_ID", "none"), ("SECRET_ACCESS_KEY", "none"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    system.mkdir("checkpoints")
    yield "s3://checkpoints/run"
    running.stop()


def test_an_s3_server_keeps_and_gives_back_a_run(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Two steps are pushed, the older one pruned; a damaged object costs its step; a run resumes from the address."""
    for step in (1, 2, 3):
        saved = {"w": values((8, 3), seed=step)}
        push(save_one(tmp_path / "run", step, saved, extra_files={"t/x": b"y"}), bucket, keep_last=2)
    found = fetch(bucket, tmp_path / "cache", print)
    assert found is not None and found.name == "step_00000003" and same(load_all(found), saved)
    store = fsspec.filesystem("s3")
    try_remote(bucket)
    with pytest.raises(Refused, match=r"(?i)nothing can be written there: .*bucket does not exist"):
        try_remote("s3://chekpoints/run")
    assert store.ls("") == ["checkpoints"]  # a mistyped bucket is not made
    assert sorted(p.rpartition("/")[2] for p in store.ls(bucket)) == ["latest", "step_00000002", "step_00000003"]
    store.pipe_file(f"{bucket}/step_00000003/rank_00000.safetensors", b"torn")
    said: list[str] = []
    again = fetch(bucket, tmp_path / "cache2", said.append)
    assert again is not None and again.name == "step_00000002" and "expected" in said[0]
    store.rm(bucket, recursive=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    words = training(bucket)
    assert cli.main([*words, "--train-iters", "2", "--save", str(tmp_path / "a")]) == 0
    assert cli.main([*words, "--train-iters", "3", "--load", bucket, "--save", str(tmp_path / "b")]) == 0
    assert "at step 2, 2 samples consumed" in capsys.readouterr().out
