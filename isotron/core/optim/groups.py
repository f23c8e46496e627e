"""Which rule, learning rate and weight decay a parameter has, by patterns on its name. PURE.

`param_groups` are words such as `embed.*:lr_mult=0.1,wd_mult=0,optimizer=lion`; `freeze` are patterns of parameters
that do not train. What two patterns say about one parameter must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from isotron.core.errors import Problem, Refused, shortened
from isotron.core.optim.config import ABSENT, METHODS, OptimConfig
from isotron.core.optim.mup import rate_factor

KEYS = ("lr_mult", "wd_mult", "optimizer")
NOT_HIDDEN = ("embed.*", "positions.*", "types.*", "head.*", "*embed*", "*lm_head*")
EXAMPLE = "embed.*:lr_mult=0.1,wd_mult=0"


@dataclass(frozen=True)
class Override:
    """What one word of `param_groups` says: its pattern, and key -> value."""

    word: str
    pattern: str
    says: Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """How one parameter is stepped. `wd_mult` None: 1 where the layout table lets weight decay apply, else 0."""

    optimizer: str
    lr_mult: float = 1.0
    wd_mult: float | None = None
    frozen: bool = False


def parse(word: str) -> Override | Problem:
    """One word of `param_groups`, or what is wrong with it."""
    pattern, _, rest = word.rpartition(":")
    says: dict[str, Any] = {}
    for item in rest.split(",") if pattern else ():
        key, _, value = (x.strip() for x in item.partition("="))
        legal = _value(key, value)
        if key == "optimizer" and value in ABSENT:
            return _wrong(word, ABSENT[value])
        if legal is None or key in says:
            return _wrong(word, f"{item.strip()!r} is none of lr_mult=NUMBER, wd_mult=NUMBER, optimizer=NAME once each")
        says[key] = legal
    return Override(word, pattern.strip(), says) if says else _wrong(word, "it is a pattern, a colon, and what it sets")


def _value(key: str, value: str) -> Any:
    if key == "optimizer":
        return value if value in METHODS else None
    if key not in KEYS:
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _wrong(word: str, case: str) -> Problem:
    return Problem(
        f"--param-groups {word}", f"{case}; optimizers are {', '.join(METHODS)}", f"--param-groups {EXAMPLE}"
    )


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix between hidden layers: what Muon steps, and muP scales with the width."""
    return len(shape) == 2 and not any(fnmatchcase(name, pattern) for pattern in NOT_HIDDEN)


def settle(
    shapes: Mapping[str, Sequence[int]], cfg: OptimConfig, whole: bool = True, width: float = 1.0
) -> dict[str, Settings]:
    """The settings of every parameter; everything that does not fit together is refused at once.

    `shapes`: of the `whole` model, else only of a part, in which a pattern may match nothing. `width`: see `mup`.
    """
    read = [parse(word) for word in cfg.param_groups]
    overrides = [found for found in read if isinstance(found, Override)]
    problems = [found for found in read if isinstance(found, Problem)]
    if whole:
        problems += list(_idle(shapes, [o.pattern for o in overrides], "--param-groups"))
        problems += list(_idle(shapes, cfg.freeze, "--freeze"))
    settings = {}
    for name, shape in shapes.items():
        mine = [o for o in overrides if fnmatchcase(name, o.pattern)]
        frozen = [p for p in cfg.freeze if fnmatchcase(name, p)]
        problems += list(_conflicts(name, mine, frozen))
        said = {key: value for o in mine for key, value in o.says.items()}
        method = said.get("optimizer") or _default(name, shape, cfg)
        if method == "muon" and len(shape) != 2:
            case = f"{name} has {len(shape)} dimension(s), and muon makes matrices orthogonal"
            problems.append(Problem(f"--param-groups {_word(mine, 'optimizer')}", case, "optimizer=adamw for it"))
        rate = said.get("lr_mult", 1.0) * rate_factor(name, shape, width, method, cfg)
        settings[name] = Settings(method, rate, said.get("wd_mult"), bool(frozen))
    if problems:
        raise Refused(shortened(list(dict.fromkeys(problems))))
    return settings


def _default(name: str, shape: Sequence[int], cfg: OptimConfig) -> str:
    return cfg.muon_others if cfg.optimizer == "muon" and not is_hidden_matrix(name, shape) else cfg.optimizer


def _word(overrides: Sequence[Override], key: str) -> str:
    return next((o.word for o in overrides if key in o.says), "")


def _idle(names: Mapping[str, Any], patterns: Sequence[str], flag: str) -> Iterator[Problem]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(list(names)[:4])
            case = f"no parameter has such a name; they are {some}, ..."
            yield Problem(f"{flag} {pattern}", case, f"{flag} with a pattern such as layers.0.*")


def _conflicts(name: str, overrides: Sequence[Override], frozen: Sequence[str]) -> Iterator[Problem]:
    for key in KEYS:
        saying = [o for o in overrides if key in o.says]
        if len({o.says[key] for o in saying}) > 1:
            words = " ".join(f"--param-groups {o.word}" for o in saying)
            yield Problem(words, f"both match {name} and set another {key}", "patterns that do not overlap")
    if frozen and overrides:
        asked = f"--freeze {frozen[0]} --param-groups {overrides[0].word}"
        yield Problem(asked, f"both match {name}, and what is frozen is not stepped", "patterns that do not overlap")
