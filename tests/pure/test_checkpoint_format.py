"""The checkpoint format without torch: manifests from outside, coverage, finding and publishing steps."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from isotron.core.checkpoint.cover import cover_error
from isotron.core.checkpoint.format import parse_manifest, read_manifest
from isotron.core.checkpoint.locate import find, steps, verify_files
from isotron.core.checkpoint.migrate import MIGRATIONS, VERSION, migrated
from isotron.core.checkpoint.publish import clean_up, prune, publish
from isotron.core.checkpoint.ranks import SingleRank, together
from isotron.core.errors import Problem, Refused, refuse
from isotron.core.layout import Box, whole

DIGEST = hashlib.sha256(b"12345678" * 8).hexdigest()


def chunk(
    offset: list[int], shape: list[int], key: str = "w@0", file: str = "rank_00000.safetensors"
) -> dict[str, Any]:
    return {"offset": offset, "shape": shape, "file": file, "key": key}


def manifest(**changes: Any) -> dict[str, Any]:
    good = {
        "format_version": 1,
        "step": 3,
        "meta": {"model": {"hidden": 4}},
        "tensors": {"w": {"dtype": "float32", "shape": [4, 4], "chunks": [chunk([0, 0], [4, 4])]}},
        "files": {"rank_00000.safetensors": {"bytes": 64, "sha256": DIGEST}},
    }
    return good | changes


def tensor(**changes: Any) -> dict[str, Any]:
    return {"tensors": {"w": {"dtype": "float32", "shape": [4, 4], "chunks": [chunk([0, 0], [4, 4])]} | changes}}


def file(name: str = "rank_00000.safetensors", **changes: Any) -> dict[str, Any]:
    return {"files": {name: {"bytes": 64, "sha256": DIGEST} | changes}}


def step_directory(run: Path, step: int) -> Path:
    """A complete step as far as a reader without torch can tell: one file of 64 bytes."""
    path = run / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "rank_00000.safetensors").write_bytes(b"12345678" * 8)
    (path / "manifest.json").write_text(json.dumps(manifest(step=step)))
    return path


def test_a_good_manifest_is_read_and_written_back_the_same():
    first = parse_manifest(json.dumps(manifest()).encode())
    assert first.tensors["w"].shape == (4, 4) and first.step == 3 and first.meta == {"model": {"hidden": 4}}
    assert parse_manifest(first.dumps()) == first
    assert json.loads(first.dumps())["format_version"] == VERSION


def test_fields_of_later_writers_are_ignored():
    assert parse_manifest(json.dumps(manifest(note="x")).encode()).step == 3


HOSTILE: list[tuple[dict[str, Any], str]] = [
    (tensor(shape=[-4, -4]), r"\.shape\[0\] is -4"),
    (tensor(shape=[2**62, 2**62]), "more bytes than a file can have"),
    (tensor(shape=[10**30]), "below 2\\*\\*63"),
    (tensor(shape=[1] * 65), "at most 64 dimensions"),
    (tensor(shape=[4.0, 4]), "must be a JSON whole number"),
    (tensor(shape=[True, 4]), "must be a JSON whole number"),
    (tensor(shape="44"), "must be a JSON array"),
    (tensor(dtype="object"), "dtype is 'object'; known are float64"),
    (tensor(dtype=None), "must be a JSON string"),
    (tensor(chunks={}), "must be a JSON array"),
    (tensor(chunks=[]), r"tensor 'w': region \[0:4, 0:4\] is written by nobody"),
    (tensor(chunks=[chunk([0, 0], [4, 3])]), r"region \[0:4, 3:4\] is written by nobody"),
    (tensor(chunks=[chunk([0, 1], [4, 4])]), "not inside shape"),
    (tensor(chunks=[chunk([0], [4])]), "not inside shape"),
    (tensor(chunks=[chunk([0, 0], [4])]), "2 offsets and 1 sizes"),
    (tensor(chunks=[chunk([0, 0], [4, 4]), chunk([0, 0], [0, 4], "w@1")]), "is empty or not inside"),
    (tensor(chunks=[chunk([0, 0], [4, 4]), chunk([1, 1], [1, 1], "w@1")]), r"region \[1:2, 1:2\] is written twice"),
    (tensor(chunks=[chunk([0, 0], [2, 4]), chunk([2, 0], [2, 4])]), "belongs to two chunks"),
    (tensor(chunks=[chunk([0, 0], [4, 4], file="../x")]), "which `files` does not list"),
    (tensor(dtype="float64"), "need 128 bytes, the file has 64"),
    ({"tensors": {"": tensor()["tensors"]["w"]}}, "1 to 1024 printable"),
    ({"tensors": {"a\n\x1b[2J": tensor()["tensors"]["w"]}}, "1 to 1024 printable"),
    ({"tensors": {"\ud800": tensor()["tensors"]["w"]}}, "1 to 1024 printable"),
    ({"tensors": []}, "tensors is \\[\\]; it must be a JSON object"),
    (file("../x"), "relative path"),
    (file("/etc/passwd"), "relative path"),
    (file("a//b"), "relative path"),
    (file("a/./b"), "relative path"),
    (file("c:x"), "without backslash and colon"),
    (file("..\\x"), "without backslash and colon"),
    (file("manifest.json"), "must not be manifest.json"),
    (file("x" * 300), "relative path"),
    (file(bytes=-1), "bytes is -1"),
    (file(sha256="AB"), "64 lower-case"),
    ({"step": -1}, "step is -1"),
    ({"step": None}, "step is None"),
    ({"meta": [1]}, "meta is \\[1\\]"),
    ({"format_version": VERSION + 1}, f"format version {VERSION + 1}, this program reads versions 1 to {VERSION}"),
    ({"format_version": 0}, "never existed"),
    ({"format_version": "1"}, "format_version is '1'"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[m for _, m in HOSTILE])
def test_hostile_manifests_are_refused_and_change_nothing(tmp_path: Path, change: dict[str, Any], message: str):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest(**change)))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Refused, match=message) as caught:
        read_manifest(tmp_path)
    assert len(str(caught.value).splitlines()) == 3 and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "Expecting value"),
        (b'{"format_version": 1, "format_version": 1}', "'format_version' appears twice"),
        (b'{"format_version": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "damaged"),
        (b"[]", "must be a JSON object"),
        (b'{"format_version": ' + b"9" * 5000 + b"}", "damaged"),
    ],
)
def test_texts_that_are_no_manifest(tmp_path: Path, text: bytes, message: str):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(Refused, match=message):
        read_manifest(tmp_path)


def test_a_missing_manifest_is_named(tmp_path: Path):
    with pytest.raises(Refused, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)


def random_partition(box: Box, random_: random.Random, cuts: int) -> list[Box]:
    boxes = [box]
    for _ in range(cuts):
        b = boxes.pop(random_.randrange(len(boxes)))
        dim = random_.randrange(len(b.shape))
        at = random_.randint(0, b.shape[dim])
        for low, n in ((0, at), (at, b.shape[dim] - at)):
            offset, shape = list(b.offset), list(b.shape)
            offset[dim] += low
            shape[dim] = n
            boxes.append(Box(tuple(offset), tuple(shape)))
    return [b for b in boxes if b.size]


def test_partitions_cover_and_any_change_of_one_box_is_found():
    random_ = random.Random(1)
    for _ in range(200):
        shape = tuple(random_.randint(1, 7) for _ in range(random_.randint(1, 4)))
        boxes = [(b, "f") for b in random_partition(whole(shape), random_, random_.randint(0, 12))]
        random_.shuffle(boxes)
        assert cover_error(shape, boxes) is None
        lost = boxes.pop()
        assert "nobody" in (cover_error(shape, boxes) or "")
        assert "twice" in (cover_error(shape, [*boxes, lost, lost]) or "")
        grown = Box(lost[0].offset, (lost[0].shape[0] + 1, *lost[0].shape[1:]))
        assert cover_error(shape, [*boxes, (grown, "f")]) is not None


def test_cover_of_scalars_and_empty_tensors():
    assert cover_error((), [(whole(()), "f")]) is None
    assert "twice" in (cover_error((), [(whole(()), "f"), (whole(()), "g")]) or "")
    assert "nobody" in (cover_error((), []) or "")
    assert cover_error((0, 5), []) is None


def test_cover_of_many_chunks_is_quick():
    boxes = [(Box((i * 4, j * 4), (4, 4)), "f") for i in range(60) for j in range(60)]
    assert cover_error((240, 240), boxes) is None
    assert cover_error((240, 240), boxes[:-1]) == "region [236:240, 236:240] is written by nobody"


def test_find_follows_latest_and_takes_a_step_itself(tmp_path: Path):
    old, new = step_directory(tmp_path, 1), step_directory(tmp_path, 2)
    (tmp_path / "latest").write_text("step_00000001\n")
    said: list[str] = []
    assert find(tmp_path, said.append) == old and find(new, said.append) == new and not said
    assert find(tmp_path / "nothing") is None


def test_find_without_any_step_is_none_and_leaves_all_as_it_is(tmp_path: Path):
    (tmp_path / "step_00000002.tmp").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    assert find(tmp_path) is None and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove file", "remove manifest", "remove step"])
def test_find_falls_back_to_the_newest_complete_step_and_says_so(tmp_path: Path, damage: str):
    step_directory(tmp_path, 1)
    good, bad = step_directory(tmp_path, 2), step_directory(tmp_path, 3)
    (tmp_path / "latest").write_text("step_00000003\n")
    data = bad / "rank_00000.safetensors"
    if damage == "truncate":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "flip":
        data.write_bytes(b"x" + data.read_bytes()[1:])
    elif damage == "remove file":
        data.unlink()
    else:
        (bad / "manifest.json").unlink()
    if damage == "remove step":
        data.unlink()
        bad.rmdir()
    said: list[str] = []
    assert find(tmp_path, said.append, hashes=True) == good
    assert "step_00000002" in said[-1] and (damage == "remove step" or "step_00000003" in said[0])


@pytest.mark.parametrize("pointer", ["../../etc", "/etc", "", "step_1", "step_00000001/..", "x" * 10_000])
def test_a_hostile_pointer_is_reported_and_not_followed(tmp_path: Path, pointer: str):
    good = step_directory(tmp_path, 1)
    (tmp_path / "latest").write_text(pointer)
    said: list[str] = []
    assert find(tmp_path, said.append) == good and "must name a step" in said[0]


def test_a_run_whose_steps_are_all_damaged_is_refused(tmp_path: Path):
    (step_directory(tmp_path, 1) / "rank_00000.safetensors").unlink()
    (step_directory(tmp_path, 2) / "manifest.json").unlink()
    with pytest.raises(Refused) as caught:
        find(tmp_path, lambda _: None)
    assert len(caught.value.problems) == 2
    with pytest.raises(Refused, match="is missing"):
        find(tmp_path / "step_00000001")


def test_verify_names_file_expected_and_found_and_shares_the_work(tmp_path: Path):
    step = step_directory(tmp_path, 1)
    data = step / "rank_00000.safetensors"
    assert verify_files(step).step == 1
    data.write_bytes(b"x" + data.read_bytes()[1:])
    found = hashlib.sha256(data.read_bytes()).hexdigest()
    with pytest.raises(Refused, match=rf"file {data.name} is damaged: expected SHA-256 {DIGEST}, found {found}"):
        verify_files(step)
    verify_files(step, share=(1, 2))
    verify_files(step, hashes=False)
    data.write_bytes(b"1")
    with pytest.raises(Refused, match="truncated or damaged: expected 64 bytes, found 1"):
        verify_files(step, hashes=False)


def test_links_out_of_the_checkpoint_are_refused(tmp_path: Path):
    step = step_directory(tmp_path / "run", 1)
    data = step / "rank_00000.safetensors"
    data.rename(tmp_path / "secret")
    data.symlink_to(tmp_path / "secret")
    with pytest.raises(Refused, match="leaves the checkpoint's directory"):
        verify_files(step)


def test_steps_for_good_stay_beside_the_last(tmp_path: Path):
    for step in (5, 10, 12, 15, 20):
        step_directory(tmp_path, step)
    publish(tmp_path, finished(tmp_path, 21), keep_last=2, keep_every=10)
    assert [int(s.name[5:]) for s in steps(tmp_path)] == [21, 20, 15, 10]


def finished(run: Path, step: int) -> str:
    path = step_directory(run, step)
    path.rename(run / f"{path.name}.tmp")
    return path.name


def test_any_flipped_bit_of_a_manifest_is_found():
    """Counters, offsets and hashes alike; the version itself cannot become an older one by one bit."""
    data = parse_manifest(json.dumps(manifest()).encode()).dumps()
    for place in range(len(data)):
        for bit in range(8):
            hurt = bytearray(data)
            hurt[place] ^= 1 << bit
            with pytest.raises((ValueError, RecursionError)):
                parse_manifest(bytes(hurt))
    with pytest.raises(ValueError, match="no manifest_sha256 at its end"):
        parse_manifest(json.dumps(manifest(format_version=VERSION)).encode())


def test_every_older_version_has_its_way_up():
    assert set(MIGRATIONS) == set(range(1, VERSION))
    for version in MIGRATIONS:
        raw = migrated({"format_version": version, "step": 3}, version)
        assert raw == {"format_version": VERSION, "step": 3}


def test_publish_moves_the_pointer_and_prunes_complete_steps_only(tmp_path: Path):
    for step in (1, 2, 3):
        step_directory(tmp_path, step)
    (step_directory(tmp_path, 4) / "manifest.json").unlink()
    path = publish(tmp_path, finished(tmp_path, 5), keep_last=2)
    assert [s.name for s in steps(tmp_path)] == ["step_00000005", "step_00000004", "step_00000003"]
    assert find(tmp_path) == path and (tmp_path / "latest").read_text() == "step_00000005\n"


def test_pruning_keeps_the_step_just_written_after_going_back(tmp_path: Path):
    step_directory(tmp_path, 50)
    current = publish(tmp_path, finished(tmp_path, 20), keep_last=1)
    assert steps(tmp_path) == [current]
    prune(tmp_path, current, 0)
    assert steps(tmp_path) == [current]


def test_clean_up_takes_only_what_saves_leave(tmp_path: Path):
    kept = step_directory(tmp_path, 1)
    (tmp_path / "notes.tmp").mkdir()
    (tmp_path / "latest.tmp").write_text("x")
    step_directory(tmp_path, 2).rename(tmp_path / "step_00000002.tmp")
    step_directory(tmp_path, 3).rename(tmp_path / "step_00000003.old")
    step_directory(tmp_path, 1 + 10**8).rename(tmp_path / "step_00000001.old")
    assert find(tmp_path, lambda _: None) == tmp_path / "step_00000003.old"
    clean_up(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {kept.name, "notes.tmp", "step_00000003"}


class TwoRanks(SingleRank):
    """Rank 0 of two; the other sends the same, or fails."""

    def __init__(self, other: Any = None) -> None:
        object.__setattr__(self, "other", other)

    def gather_json(self, obj: Any) -> list[Any]:
        return [obj, self.other or obj]


def test_ranks_fail_together_and_say_who():
    assert together(TwoRanks(), "save", lambda: 5, lambda n: n + 1) == (5, [6, 6])
    with pytest.raises(Refused, match=r"asked:  save\nbut:    OSError: no disk \(rank 1 of 2\)\ntry:    again"):
        together(TwoRanks([None, [["save", "OSError: no disk", "again"]], 1]), "save", lambda: 5)

    def fail() -> None:
        raise refuse("a", "b", "c")

    with pytest.raises(Refused) as caught:
        together(TwoRanks(), "save", fail)
    assert caught.value.problems == (Problem("a", "b", "c"),) and caught.value.exit_code == 2
