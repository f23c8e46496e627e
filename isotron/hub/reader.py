"""The tensors of a Hugging Face directory under our names: a `TensorSource` that reads only what is asked for.

Bytes go from the file straight into their place, or through a buffer of at most 16 MB where dtype or strides differ;
nothing is mapped, so that the memory of a process stays what its tensors take.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from isotron.core.errors import Problem, Refused, listed, refuse
from isotron.core.layout import Box, Ints, whole
from isotron.core.models.hf_names import Mapped, entry_of
from isotron.hub.files import OpenFiles
from isotron.hub.folder import DTYPES, Folder, Stored, open_folder, stored_tensors

BUFFER = 2**24


class HFSource:
    """Opening it matches every tensor of the directory with one of the model, by name and shape, or refuses.

    `check_head`: where the config ties the head to the embedding and the file has both, they must be equal.
    """

    def __init__(self, folder: Folder | str | Path, check_head: bool = True) -> None:
        self.folder = folder if isinstance(folder, Folder) else open_folder(folder)
        self.stored = renamed(stored_tensors(self.folder.path), getattr(self.folder.spelling, "OLDER", {}))
        cfg = self.folder.model
        self.mapped = {m.ours: m for m in self.folder.spelling.tensors(cfg)}
        table = cfg.layout(cfg.vocab_size)
        self.shapes: dict[str, Ints] = {name: table.rule(name).shape for name in self.mapped}
        self.ignored: list[str] = []
        self._files = OpenFiles()
        self._match()
        if check_head and self.folder.spelling.HEAD in self.ignored:
            self._check_head()

    # ---- the protocol of checkpoints -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Our names of all tensors."""
        return list(self.mapped)

    def info(self, name: str) -> tuple[torch.dtype, Ints]:
        """Dtype (the widest, where ours is made of several of theirs) and shape."""
        dtypes = [dtype_of(self.theirs(n)) for n in self.mapped[name].theirs()]
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest, self.shapes[name]

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Copy region `box` of our tensor into `out`."""
        mapped, start = self.mapped[name], 0
        for run in mapped.runs:
            ours = Box((start, *box.offset[1:]), (run.count, *box.shape[1:]))
            start += run.count
            common = ours.overlap(box)
            if common is None:
                continue
            rows = run.rows(common.offset[0] - ours.offset[0], common.shape[0])
            region = Box((rows.start, *common.offset[1:]), (rows.stop - rows.start, *common.shape[1:]))
            target = out[common.relative_to(box).slices()]
            if run.step == 1:
                self._read(self.theirs(run.theirs), region, target, mapped.transposed)
                continue
            between = torch.empty(region.shape, dtype=target.dtype)
            self._read(self.theirs(run.theirs), region, between, mapped.transposed)
            target.copy_(between[:: run.step])

    def close(self) -> None:
        """Close all files; reading opens them again."""
        self._files.close()

    # ---- files -----------------------------------------------------------------------------------------------------

    def theirs(self, name: str) -> Stored:
        """One of their tensors or entries, with or without the prefix that files of a model without head lack."""
        whole_name, i = entry_of(name)
        stored = self.stored[self._actual(whole_name)]
        if i is None:
            return stored
        size = (stored.stop - stored.start) // stored.shape[0]
        start = stored.start + i * size
        return Stored(stored.file, stored.dtype, stored.shape[1:], start, start + size)

    def _actual(self, name: str) -> str:
        return name if name in self.stored else name.removeprefix(self.folder.spelling.PREFIX)

    def _read(self, stored: Stored, region: Box, out: Tensor, transposed: bool) -> None:
        if transposed:
            region = Box(region.offset[::-1], region.shape[::-1])
            out = out.t()
        read_region(self._files[stored.file], stored, region, out)

    # ---- what must hold --------------------------------------------------------------------------------------------

    def _match(self) -> None:
        """Every tensor exactly once, with its shape; everything that is wrong in one refusal."""
        used: set[str] = set()
        missing, shapes = [], []
        for mapped in self.mapped.values():
            for name, shape in their_shapes(mapped, self.shapes[mapped.ours]).items():
                actual = self._actual(name)
                if actual not in self.stored:
                    missing.append(name)
                    continue
                used.add(actual)
                if self.stored[actual].shape != shape:
                    shapes.append(
                        f"{actual} has shape {list(self.stored[actual].shape)}, the config says {list(shape)}"
                    )
        dtypes = [f"{n} has dtype {self.stored[n].dtype}" for n in sorted(used) if self.stored[n].dtype not in DTYPES]
        left = [n for n in self.stored if n not in used]
        spelling = self.folder.spelling
        tied = {spelling.HEAD} if self.folder.model.tie_embeddings else set()
        self.ignored = [n for n in left if n in tied or any(fnmatchcase(n, p) for p in spelling.IGNORED)]
        self._report(missing, [n for n in left if n not in self.ignored], shapes + dtypes)

    def _report(self, missing: list[str], unknown: list[str], wrong: list[str]) -> None:
        asked, fix = (
            f"the weights in {self.folder.path}",
            "the directory as it was published, config and weights together",
        )
        problems = []
        if missing == [self.folder.spelling.HEAD]:
            case = f"config.json says tie_word_embeddings false, and there is no {missing[0]}"
            problems.append(Problem(asked, case, '"tie_word_embeddings": true in config.json, if the model was tied'))
        elif missing:
            problems.append(Problem(asked, f"{len(missing)} tensors are missing: {listed(missing)}", fix))
        if unknown:
            case = f"the model has no place for {len(unknown)} tensors: {listed(sorted(unknown))}"
            problems.append(Problem(asked, case, fix))
        if wrong:
            problems.append(Problem(asked, listed(wrong, "; "), fix))
        if problems:
            raise Refused(problems)

    def _check_head(self) -> None:
        head, embedding = self.stored[self.folder.spelling.HEAD], self.theirs(self.folder.spelling.EMBEDDING)
        if head.shape != embedding.shape or not self._equal(head, embedding):
            raise refuse(
                f"the weights in {self.folder.path}",
                f"config.json ties the head to the embedding, and {self.folder.spelling.HEAD} differs from it",
                '"tie_word_embeddings": false in config.json keeps the head that is stored',
            )

    def _equal(self, a: Stored, b: Stored) -> bool:
        rows = max(1, BUFFER // max(1, a.shape[1] * DTYPES[a.dtype][1]))
        for start in range(0, a.shape[0], rows):
            region = Box((start, 0), (min(rows, a.shape[0] - start), a.shape[1]))
            pair = []
            for stored in (a, b):
                pair.append(torch.empty(region.shape, dtype=dtype_of(stored)))
                read_region(self._files[stored.file], stored, region, pair[-1])
            if not torch.equal(*pair):
                return False
        return True


def renamed(stored: dict[str, Stored], older: Mapping[str, str]) -> dict[str, Stored]:
    """Tensors of old files under the names that they have today; `older`: ends of names, then and now."""
    found = {}
    for name, tensor in stored.items():
        then = next((end for end in older if name.endswith(end)), "")
        found[name.removesuffix(then) + older.get(then, "")] = tensor
    return found


def dtype_of(stored: Stored) -> torch.dtype:
    """torch's dtype of one of their tensors."""
    found: torch.dtype = getattr(torch, DTYPES[stored.dtype][0])
    return found


def their_shape(mapped: Mapped, rows: int, ours: Ints) -> Ints:
    """The shape of their tensor that gives `rows` rows of ours."""
    shape = (rows, *ours[1:])
    return shape[::-1] if mapped.transposed else shape


def their_shapes(mapped: Mapped, ours: Ints) -> dict[str, Ints]:
    """Their tensors as they are stored, entries put together, in order of appearance."""
    found: dict[str, Ints] = {}
    for name, rows in mapped.theirs().items():
        shape, (head, i) = their_shape(mapped, rows, ours), entry_of(name)
        found[head] = shape if i is None else (i + 1, *shape)
    return found


def read_region(file: int, stored: Stored, region: Box, out: Tensor) -> None:
    """Bytes of a region into `out`; whole rows are read, and columns cut out of them."""
    dtype, size = dtype_of(stored), DTYPES[stored.dtype][1]
    width = whole(stored.shape[1:]).size
    first, count = (region.offset[0], region.shape[0]) if region.shape else (0, 1)
    if region.shape[1:] == stored.shape[1:] and out.dtype == dtype and out.is_contiguous() and out.device.type == "cpu":
        _fill(file, memoryview(out.view(torch.uint8).reshape(-1).numpy()), stored.start + first * width * size)  # type: ignore[arg-type]
        return
    rows = max(1, BUFFER // max(1, width * size))
    buffer = bytearray(min(rows, count) * width * size)
    every = (slice(None), *(slice(o, o + n) for o, n in zip(region.offset[1:], region.shape[1:], strict=True)))
    for start in range(0, count, rows):
        n = min(rows, count - start)
        part = memoryview(buffer)[: n * width * size]
        _fill(file, part, stored.start + (first + start) * width * size)
        values = torch.frombuffer(buffer, dtype=dtype, count=n * width).view(n, *stored.shape[1:])
        out[start : start + n].copy_(values[every])


def _fill(file: int, buffer: memoryview, offset: int) -> None:
    while buffer.nbytes:
        n = os.preadv(file, [buffer], offset)
        if n == 0:
            raise OSError(f"a file of weights ended at byte {offset} while it was read")
        buffer, offset = buffer[n:], offset + n
