"""A source of tensors under other names: a table of renames between a checkpoint and the model that takes it in.

A rename is `OLD=NEW`; one `*` on both sides stands for the same text: `backbone.*=layers.*`. The first rename that
fits a name of the checkpoint is used, and names that none fits stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from isotron.core.checkpoint.load import TensorSource
from isotron.core.errors import Problem, Refused, refuse
from isotron.core.layout import Box, Ints

Rename = tuple[str, str]


def parse_renames(words: Sequence[str]) -> list[Rename]:
    """The table from `OLD=NEW` words; everything that is wrong with them in one refusal."""
    found: list[Rename] = []
    problems = []
    for word in words:
        old, equals, new = word.partition("=")
        if not (old and equals and new) or old.count("*") != new.count("*") or old.count("*") > 1:
            case = "a rename is OLD=NEW, with one * on both sides or on none"
            problems.append(Problem(f"--rename {word}", case, "--rename 'backbone.*=layers.*'"))
        found.append((old, new))
    if problems:
        raise Refused(problems)
    return found


def renamed(name: str, table: Iterable[Rename]) -> str:
    """The model's name for a checkpoint's name; optimizer state (`master/NAME`) follows its parameter."""
    kind, slash, name = name.rpartition("/")
    return kind + slash + _plain(name, table)


def _plain(name: str, table: Iterable[Rename]) -> str:
    for old, new in table:
        head, star, tail = old.partition("*")
        if not star and name == old:
            return new
        if star and len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail):
            return new.replace("*", name[len(head) : len(name) - len(tail)])
    return name


class Renamed:
    """`source` under the names that a table of renames gives; refuses two names that become one, and idle renames."""

    def __init__(self, source: TensorSource, table: Sequence[Rename]) -> None:
        self._source = source
        self._old: dict[str, str] = {}
        used = set()
        for old in source.names():
            new = renamed(old, table)
            used |= {rename for rename in table if renamed(old, [rename]) != old}
            if new in self._old:
                case = f"{self._old[new]} and {old} of the checkpoint would both be {new}"
                raise refuse(f"--rename {_words(table)}", case, "a table that gives every tensor a name of its own")
            self._old[new] = old
        idle = [rename for rename in table if rename not in used]
        if idle:
            some = ", ".join(sorted(source.names())[:5])
            fix = "leave it out, or use a name that isotron inspect lists"
            raise refuse(
                f"--rename {_words(idle)}", f"no tensor of the checkpoint is called so; it has {some}, ..", fix
            )

    def names(self) -> list[str]:
        """Names of all tensors, as the model calls them."""
        return list(self._old)

    def info(self, name: str) -> tuple[torch.dtype, Ints]:
        """Dtype and global shape of a tensor."""
        return self._source.info(self._old.get(name, name))

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Copy region `box` of a tensor into `out`."""
        self._source.read(self._old.get(name, name), box, out)


def _words(table: Iterable[Rename]) -> str:
    return " ".join(f"{old}={new}" for old, new in table)
