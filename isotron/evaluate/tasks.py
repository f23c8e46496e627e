"""The tasks by name, and the words of a command that ask for them. PURE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from isotron.core.errors import Problem, Refused, refuse
from isotron.evaluate.choices import mnli, qqp, race
from isotron.evaluate.lambada import lambada
from isotron.evaluate.options import Asked
from isotron.evaluate.perplexity import documents, existing_prefix, wikitext
from isotron.evaluate.result import Result
from isotron.evaluate.rows import LogProbs

TASKS: dict[str, Callable[[Asked, LogProbs], Result]] = {
    "wikitext103": wikitext,
    "lambada": lambada,
    "mnli": mnli,
    "qqp": qqp,
    "race": race,
    "perplexity": documents,
}
HARNESS = "harness"


def read_tasks(words: Sequence[str], data: Sequence[str] = (), option: str = "--task") -> list[tuple[str, str]]:
    """(task, path) of words such as lambada=PATH, or of one name with its paths in `data`.

    A task of the harness is harness=NAME.
    """
    if len(words) == 1 and "=" not in words[0] and data:
        words = [f"{words[0]}={path}" for path in data]
    found = []
    for word in words:
        name, given, path = word.partition("=")
        name = name.lower()
        known = ", ".join((*TASKS, HARNESS))
        if name not in (*TASKS, HARNESS):
            raise refuse(f"{option} {word}", f"the tasks are {known}", f"{option} lambada=lambada_test.jsonl")
        if not given or not path:
            raise refuse(f"{option} {word}", "a task is followed by its data", f"{option} {name}=PATH")
        found.append((name, path))
    return found


def missing(tasks: Sequence[tuple[str, str]], option: str = "--task") -> list[Problem]:
    """Paths of tasks where there is nothing."""
    absent = [(n, p) for n, p in tasks if n != HARNESS and not Path(p).expanduser().exists() and not existing_prefix(p)]
    return [Problem(f"{option} {n}={p}", "there is no such file or directory", f"{option} {n}=PATH") for n, p in absent]


def problems_of(words: Sequence[str], option: str = "--eval-tasks") -> list[Problem]:
    """What is wrong with the tasks of a training run."""
    try:
        tasks = read_tasks(words, option=option)
    except Refused as refused:
        return list(refused.problems)
    outside = [path for name, path in tasks if name == HARNESS]
    case = "the harness runs on checkpoints, not during training"
    fix = f"isotron evaluate --task {HARNESS}=NAME"
    return [*missing(tasks, option), *(Problem(f"{option} {HARNESS}={path}", case, fix) for path in outside)]


def evaluate(how: Asked, logprobs: LogProbs) -> Result:
    """Run one task."""
    return TASKS[how.name](how, logprobs)
