"""Saving and loading: any partition into any other, all or nothing, damage named, memory bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from isotron.core.checkpoint import disk, files, publish, save
from isotron.core.checkpoint.format import DTYPES as FORMAT_DTYPES
from isotron.core.checkpoint.load import Loaded, Source, Wanted, load_tensors
from isotron.core.checkpoint.locate import find, verify_files
from isotron.core.checkpoint.ranks import SingleRank
from isotron.core.checkpoint.save import Saved, save_checkpoint
from isotron.core.errors import LISTED, Problem, Refused, listed, shortened
from isotron.core.layout import Box, whole

DTYPES = {name for name in FORMAT_DTYPES if hasattr(torch, name)}  # an older torch lacks the youngest types
Pieces = list[tuple[Box, torch.Tensor]]


class Shared:
    """What the threads of one simulated group have in common."""

    def __init__(self, size: int) -> None:
        self.size, self.slots, self.value = size, [""] * size, ""
        self.gate = threading.Barrier(size, timeout=30)


class ThreadRank:
    """`Ranks` of one thread; objects travel as JSON, as they would between processes."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank, self.size = shared, rank, shared.size

    def gather_json(self, obj: Any) -> list[Any] | None:
        self.shared.slots[self.rank] = json.dumps(obj)
        self.barrier()
        everything = [json.loads(s) for s in self.shared.slots] if self.rank == 0 else None
        self.barrier()
        return everything

    def broadcast_json(self, obj: Any) -> Any:
        if self.rank == 0:
            self.shared.value = json.dumps(obj)
        self.barrier()
        value = json.loads(self.shared.value)
        self.barrier()
        return value

    def barrier(self) -> None:
        self.shared.gate.wait()


def on_ranks(size: int, body: Callable[[ThreadRank], Any]) -> list[Any]:
    """`body` on `size` threads; the results, or the exceptions, in rank order."""
    shared, results = Shared(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadRank(shared, rank))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    raw = torch.randint(0, 256, (*shape, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.bool:
        return raw[..., 0] > 127
    return raw[..., : dtype.itemsize].contiguous().view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaNs compare like everything else."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def one(name: str, tensor: torch.Tensor) -> Saved:
    return Saved(name, tensor.dtype, tuple(tensor.shape), [(whole(tensor.shape), tensor)])


def save_one(run: Path, step: int, tensors: dict[str, torch.Tensor], **options: Any) -> Path:
    return save_checkpoint(run, step, [one(n, t) for n, t in tensors.items()], {"step": step}, SingleRank(), **options)


def load_all(step: Path) -> dict[str, torch.Tensor]:
    source = Source(step)
    out = {n: torch.empty(source.info(n)[1], dtype=source.info(n)[0]) for n in source.names()}
    assert load_tensors(source, [Wanted(n, [(whole(t.shape), t)], tuple(t.shape)) for n, t in out.items()]) == Loaded(
        (), ()
    )
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(bits(a[n]), bits(b[n])) for n in a)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[list[Box]]:
    """A random partition of a shape, dealt to ranks; some boxes and some ranks are empty."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for low, n in ((0, at), (at, box.shape[dim] - at)):
            offset = tuple(o + low * (d == dim) for d, o in enumerate(box.offset))
            boxes.append(Box(offset, tuple(n if d == dim else m for d, m in enumerate(box.shape))))
    dealt: list[list[Box]] = [[] for _ in range(ranks)]
    for box in boxes:
        dealt[draw(st.integers(0, ranks - 1))].append(box)
    return dealt


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_partition_loads_into_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    run = tmp_path_factory.mktemp("run")
    savers, loaders = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=4))
    dtypes = [getattr(torch, data.draw(st.sampled_from(sorted(DTYPES)))) for _ in shapes]
    full = {f"layers.{i}.w": values(s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))}
    dealt = {n: data.draw(partitions(tuple(t.shape), savers)) for n, t in full.items()}

    def saved(rank: int) -> list[Saved]:  # views of the whole: any strides
        return [
            Saved(n, t.dtype, tuple(t.shape), [(b, t[b.slices()]) for b in dealt[n][rank]]) for n, t in full.items()
        ]

    paths = on_ranks(savers, lambda r: save_checkpoint(run, 10, saved(r.rank), {"a": 1}, r))
    assert paths == [run / "step_00000010"] * savers and find(run) == paths[0]
    manifest = verify_files(paths[0])
    payload = sum(_payload(paths[0] / name) for name in manifest.files)
    assert payload == sum(t.numel() * t.element_size() for t in full.values())

    wanted_boxes = {n: data.draw(partitions(tuple(t.shape), loaders)) for n, t in full.items()}
    for rank in range(loaders):
        wanted = [
            Wanted(n, [(b, torch.zeros(b.shape, dtype=t.dtype)) for b in wanted_boxes[n][rank]], tuple(t.shape))
            for n, t in full.items()
        ]
        load_tensors(Source(paths[0]), wanted)
        for w in wanted:
            assert all(torch.equal(bits(out), bits(full[w.name][box.slices()])) for box, out in w.pieces)


def _payload(file: Path) -> int:
    data = file.read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_in_every_form(tmp_path: Path, name: str):
    dtype = getattr(torch, name)
    full = {"matrix": values((5, 3), dtype), "scalar": values((), dtype, 1), "empty": values((0, 3), dtype)}
    full["transposed"] = values((3, 7), dtype, 2).t()
    step = save_one(tmp_path, 1, full)
    assert same(load_all(step), full)
    with safe_open(step / "rank_00000.safetensors", "pt") as f:  # any safetensors reader understands the file
        assert torch.equal(bits(f.get_tensor("transposed@0")), bits(full["transposed"]))


def test_large_tensors_go_in_slabs_and_files_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "SLAB_BYTES", 40)
    monkeypatch.setattr(save, "FILE_BYTES", 400)
    full = {f"w{i}": values((i + 1, 2, 20), seed=i).transpose(0, 2) for i in range(4)}
    step = save_one(tmp_path, 1, full)
    assert same(load_all(step), full)
    assert sorted(f.name for f in step.glob("*.safetensors"))[:2] == [
        "rank_00000.safetensors",
        "rank_00000_1.safetensors",
    ]


def test_meta_and_further_files_are_kept(tmp_path: Path):
    tree = tmp_path / "tree"
    (tree / "tok").mkdir(parents=True)
    (tree / "tok" / "vocab.json").write_bytes(b"{}")
    meta = {"model": {"hidden": 4}, "lr": 1e-3, "text": "ü\n"}
    for extra in (tree, {"tok/vocab.json": tree / "tok" / "vocab.json"}, {"tok/vocab.json": b"{}"}):
        step = save_checkpoint(tmp_path / "run", 1, [], meta, SingleRank(), extra_files=extra)
        manifest = verify_files(step)
        assert manifest.meta == meta and list(manifest.files) == ["tok/vocab.json"]
        assert (step / "tok" / "vocab.json").read_bytes() == b"{}"
    for name in ("../x", "/x", "manifest.json", "rank_00000.safetensors"):
        with pytest.raises(Refused, match="its name must"):
            save_checkpoint(tmp_path / "run", 2, [], {}, SingleRank(), extra_files={name: b""})


class Killed(BaseException):
    """Stands for the death of the process: nobody may handle it."""


def dying(call: Callable[..., Any], at: int) -> Callable[..., Any]:
    """`call`, but the process dies before its call number `at`."""
    done = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        if done == at:
            raise Killed
        return call(*args, **kwargs)

    return wrapped


STAGES = [(disk.os, "fsync", n) for n in range(1, 8)] + [(os, "replace", n) for n in range(1, 4)]
STAGES += [(publish, "_remove", 1), (publish, "prune", 1), (save, "write_manifest", 1)]


@pytest.mark.parametrize(("where", "call", "at"), STAGES, ids=[f"{c}-{n}" for _, c, n in STAGES])
@pytest.mark.parametrize("step", [1, 2], ids=["same step again", "next step"])
def test_a_kill_at_any_stage_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, call: str, at: int, step: int
):
    old, new = {"w": values((4, 4))}, {"w": values((4, 4), seed=1)}
    save_one(tmp_path, 1, old)
    monkeypatch.setattr(where, call, dying(getattr(where, call), at))
    try:
        save_one(tmp_path, step, new, keep_last=1)
    except Killed:
        died = True
    else:
        died = False
    monkeypatch.undo()
    found = find(tmp_path, lambda _: None, hashes=True)
    assert found is not None
    assert same(load_all(found), old) or same(load_all(found), new)
    assert died or same(load_all(found), new)
    again = save_one(tmp_path, 3, new, keep_last=1)  # and the next save clears all traces
    assert find(tmp_path) == again and sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000003"]


def test_an_error_of_one_rank_is_an_error_of_all_and_the_previous_step_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    full = {"w": values((4, 4))}
    step = save_one(tmp_path, 1, full)

    def failing(directory: Path, staged: save.Staged) -> dict[str, Any]:
        if "rank_00001.safetensors" in staged.files:
            raise OSError(28, "No space left on device")
        return {n: files.write_tensors(directory / n, items) for n, items in staged.files.items()}

    monkeypatch.setattr(save, "write_staged", failing)
    rows = [Box((r * 2, 0), (2, 4)) for r in range(2)]

    def body(ranks: ThreadRank) -> Path:
        mine = rows[ranks.rank]
        return save_checkpoint(
            tmp_path, 2, [Saved("w", torch.float32, (4, 4), [(mine, full["w"][mine.slices()])])], {}, ranks
        )

    for error in on_ranks(2, body):
        assert isinstance(error, Refused) and error.exit_code == 1
        assert "No space left on device (rank 1 of 2)" in str(error) and "save step 2" in str(error)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000001"]
    assert same(load_all(step), full)


def test_a_rank_that_does_not_see_the_directory_is_named(tmp_path: Path):
    with pytest.raises(Refused, match="is not there on this rank"):
        save.write_part(tmp_path / "step_00000001.tmp", save.Staged({}, {}), {})


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = {"w": values((4, 4))}
    step = save_one(tmp_path, 1, full)
    monkeypatch.setattr(save, "free_bytes", lambda _: 100)
    with pytest.raises(Refused, match=r"needs 16777280 bytes, 100 are free") as caught:
        save_one(tmp_path, 2, full)
    assert len(str(caught.value).splitlines()) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", step.name] and same(load_all(step), full)


def saved_by_two(tmp_path: Path, first: list[Saved], second: list[Saved], steps: tuple[int, int] = (1, 1)) -> Refused:
    """The refusal that both ranks raise."""
    errors = on_ranks(2, lambda r: save_checkpoint(tmp_path / "run", steps[r.rank], (first, second)[r.rank], {}, r))
    assert all(isinstance(e, Refused) for e in errors)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    return errors[1]


def rows_of(shape: tuple[int, int], start: int, stop: int, dtype: torch.dtype = torch.float32) -> list[Saved]:
    box = Box((start, 0), (stop - start, shape[1]))
    return [Saved("w", dtype, shape, [(box, torch.zeros(box.shape, dtype=dtype))])]


def test_elements_written_twice_by_nobody_or_differently_are_refused_with_their_region(tmp_path: Path):
    twice = saved_by_two(tmp_path, rows_of((4, 2), 0, 3), rows_of((4, 2), 2, 4))
    assert "save the tensor 'w'" in str(twice) and "region [2:3, 0:2] is written twice, in rank_00000" in str(twice)
    assert "region [1:2, 0:2] is written by nobody" in str(
        saved_by_two(tmp_path, rows_of((4, 2), 0, 1), rows_of((4, 2), 2, 4))
    )
    other = saved_by_two(tmp_path, rows_of((4, 2), 0, 2), rows_of((4, 2), 2, 4, torch.float64))
    assert "an earlier rank has float32 of shape [4, 2], rank 1 has float64" in str(other)
    assert "different steps [1, 2]" in str(saved_by_two(tmp_path, rows_of((4, 2), 0, 2), rows_of((4, 2), 2, 4), (1, 2)))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([Saved("w", torch.float32, (2,), [(Box((1,), (2,)), torch.zeros(2))])], "does not lie inside shape"),
        ([Saved("w", torch.float32, (2,), [(Box((0,), (2,)), torch.zeros(3))])], "comes with a tensor float32"),
        ([Saved("w", torch.float32, (2,), [(Box((0,), (2,)), torch.zeros(2).double())])], "a tensor float64"),
        ([Saved("w", torch.complex64, (), [])], "dtype complex64 cannot be stored"),
        ([Saved("", torch.float32, (), [])], "its name must have"),
        ([one("w", torch.zeros(2)), one("w", torch.zeros(2))], "in two entries"),
    ],
    ids=["outside", "shape", "dtype", "complex", "name", "twice"],
)
def test_tensors_that_cannot_be_saved(tmp_path: Path, saved: list[Saved], message: str):
    with pytest.raises(Refused, match=message):
        save_checkpoint(tmp_path, 1, saved, {}, SingleRank())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": {1, 2}}, {"a": torch.zeros(1)}])
def test_meta_that_is_not_json(tmp_path: Path, meta: dict[str, Any]):
    with pytest.raises(Refused, match="cannot be written as JSON"):
        save_checkpoint(tmp_path, 1, [], meta, SingleRank())


def test_meta_that_would_be_ambiguous_is_never_published(tmp_path: Path):
    with pytest.raises(Refused, match="key '1' appears twice"):
        save_checkpoint(tmp_path, 1, [], {"a": {1: 0, "1": 0}}, SingleRank())
    assert not list(tmp_path.iterdir())


def test_a_negative_step_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match="a step is a whole number"):
        save_checkpoint(tmp_path, -1, [], {}, SingleRank())


@pytest.mark.parametrize("damage", ["header", "length", "truncated", "other dtype", "other key"])
def test_files_that_contradict_the_manifest_are_named(tmp_path: Path, damage: str):
    step = save_one(tmp_path, 1, {"w": values((4, 4))})
    file = step / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        del data[-1]
    elif damage == "length":
        data[7] = 255
    elif damage == "header":
        data[8] = 0
    else:
        old, new = {"other dtype": (b'"F32"', b'"I32"'), "other key": (b'"w@0"', b'"x@0"')}[damage]
        data = data.replace(old, new)
    file.write_bytes(data)
    with pytest.raises(Refused, match=r"file rank_00000\.safetensors is (truncated or )?damaged"):
        load_all(step)
    with pytest.raises(Refused, match=r"file rank_00000\.safetensors is (truncated or )?damaged: expected"):
        verify_files(step)


def test_refusals_show_the_first_names_of_a_large_model_and_how_many_there_are(tmp_path):
    names = [f"layers.{i}.{j}" for i in range(60) for j in range(500)]
    wanted = [Wanted(name, [], shape=(3,)) for name in names]
    held = [*names[:15000], *(f"other.{i}" for i in range(15000))]
    with pytest.raises(Refused) as caught:
        load_tensors(SimpleNamespace(names=lambda: held, info=lambda name: (torch.float32, (2,))), wanted)
    assert [f"({n} in all)" in p.case for p, n in zip(caught.value.problems, ["15,000"] * 3, strict=True)] == [True] * 3
    assert len(str(caught.value)) < 8000
    assert listed(range(LISTED)) == ", ".join(map(str, range(LISTED)))
    few = shortened([Problem("asked", str(i), "fix") for i in range(100)])
    assert len(few) == LISTED + 1 and few[-1].case == "80 more like these"


def test_all_names_and_shapes_that_differ_are_in_one_refusal(tmp_path: Path):
    step = save_one(
        tmp_path, 1, {"old": values((2,)), "w": values((4, 2)), "v": values((3,)), "exp_avg/w": values((4, 2))}
    )
    outs = {n: torch.full(s, 7.0) for n, s in {"new": (2,), "w": (4, 3), "v": (3,)}.items()}
    wanted = [Wanted(n, [(whole(t.shape), t)], tuple(t.shape)) for n, t in outs.items() if n != "v"]
    wanted.append(Wanted("v", [(Box((2,), (2,)), torch.zeros(2))]))
    with pytest.raises(Refused) as caught:
        load_tensors(Source(step), wanted, ignore=lambda n: n.startswith("exp_avg/"))
    text = str(caught.value)
    assert "lacks 1 of them: new" in text and "no place for 1 of them: old" in text and "exp_avg" not in text
    assert "w has shape [4, 2] in the checkpoint and [4, 3] in the model; v has shape [3]" in text
    assert all((t == 7).all() for t in outs.values())


def test_a_renamed_tensor_lists_both_names_unless_not_strict(tmp_path: Path):
    step = save_one(tmp_path, 1, {"norm.gain": values((2,)), "w": values((2,))})
    out, w = torch.full((2,), 7.0), torch.zeros(2)
    wanted = [Wanted("norm.weight", [(whole((2,)), out)]), Wanted("w", [(whole((2,)), w)])]
    with pytest.raises(Refused, match=r"(?s)norm\.weight.*norm\.gain"):
        load_tensors(Source(step), wanted)
    assert load_tensors(Source(step), wanted, strict=False) == Loaded(("norm.weight",), ("norm.gain",))
    assert (out == 7).all() and torch.equal(bits(w), bits(values((2,))))
    assert load_tensors(Source(step), wanted[1:], known=["norm.gain"]) == Loaded((), ())


def test_floats_are_converted_and_integers_are_not(tmp_path: Path):
    step = save_one(tmp_path, 1, {"f": torch.tensor([1.5, -2.25]), "i": torch.tensor([300, 2])})
    for dtype in (torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        out = torch.zeros(2, dtype=dtype)
        Source(step).read("f", whole((2,)), out)
        assert out.float().tolist() == [1.5, -2.25]
    for name, dtype in (("f", torch.int64), ("i", torch.uint8), ("i", torch.float32)):
        with pytest.raises(Refused, match="cannot hold it"):
            Source(step).read(name, whole((2,)), torch.zeros(2, dtype=dtype))


def test_reading_what_is_not_there(tmp_path: Path):
    source = Source(save_one(tmp_path, 1, {"w": values((4, 4))}))
    with pytest.raises(Refused, match="holds no tensor 'x'"):
        source.info("x")
    with pytest.raises(Refused, match="does not lie inside 'w'"):
        source.read("w", Box((3, 0), (2, 4)), torch.zeros(2, 4))
    with pytest.raises(Refused, match="does not fit into shape"):
        source.read("w", Box((3, 0), (1, 4)), torch.zeros(2, 4))


def test_files_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(save, "FILE_BYTES", 1)
    full = {f"w{i}": values((3,), seed=i) for i in range(20)}
    source = Source(save_one(tmp_path, 1, full))
    for name, tensor in full.items():
        out = torch.zeros(3)
        source.read(name, whole((3,)), out)
        assert torch.equal(bits(out), bits(tensor)) and len(source._open) <= 8
    source.close()
    assert not source._open


SMALL_READ = """
import resource, sys, torch
from isotron.core.checkpoint.load import Source
from isotron.core.layout import Box
out = torch.zeros(16, 64)
source = Source(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for row in (0, 100_000, 500_000):
    source.read("w", Box((row, 64), (16, 64)), out)
    assert (out == 1).all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_small_box_of_a_big_tensor_costs_little_memory(tmp_path: Path):
    step = save_one(tmp_path, 1, {"w": torch.ones(1, 128).expand(500_100, 128)})  # 256 MB stored, 512 bytes held
    ran = subprocess.run(
        [sys.executable, "-c", SMALL_READ, str(step)], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(ran.stdout) < 24 * 1024, f"{ran.stdout} kB"


def test_the_program_in_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert torch.equal(names["lower"], names["weight"][4:])
