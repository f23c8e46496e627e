"""The lm-eval harness on a model of ours, so that its whole list of tasks works: --task harness=NAME.

The harness asks for log-likelihoods and for greedy continuations; the former are rows like any other task's, the latter
come from `generate`, which the command joins in. Every rank runs the same harness on the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from isotron.core.errors import refuse
from isotron.evaluate.choices import encoded
from isotron.evaluate.options import Asked
from isotron.evaluate.result import Result, Value
from isotron.evaluate.rows import LogProbs, Row, cut, windows
from isotron.tokenizers.base import need_library

# (prompt, texts to stop at, new tokens at most, temperature) of each request -> its continuation
Generate = Callable[[Sequence[tuple[str, tuple[str, ...], int, float]]], list[str]]
NEW_TOKENS = 256  # where a task does not say


def harness(how: Asked, logprobs: LogProbs, generate: Generate, include: str = "") -> list[Result]:
    """Results of the harness's task, group or tag `how.path`. `include`: a directory with further task files."""
    library = need_library("lm_eval", f"--task harness={how.path}")
    manager = _manager(include)
    model = _adapter(how, logprobs, generate)
    try:
        found = library.simple_evaluate(
            model=model, tasks=[how.path], task_manager=manager, limit=how.limit or None, bootstrap_iters=1000,
            log_samples=False,
        )  # fmt: skip
    except (KeyError, ValueError, OSError) as error:
        case = f"lm-eval says: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        fix = "--task harness=NAME with a task whose data is on this machine; --harness-path DIR for one's own"
        raise refuse(f"--task harness={how.path}", case, fix) from error
    return [_result(name, numbers, found) for name, numbers in found["results"].items()]


@cache
def _manager(include: str) -> Any:
    """The list of all tasks, with those of a directory: thousands of files are read for it, once for all tasks."""
    return import_module("lm_eval.tasks").TaskManager(include_path=include or None)


def _result(name: str, numbers: Mapping[str, Any], found: Mapping[str, Any]) -> Result:
    """The harness writes `acc,none` beside `acc_stderr,none`."""
    values = {}
    for key, value in numbers.items():
        metric, _, kind = key.partition(",")
        if kind and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            error = numbers.get(f"{metric}_stderr,{kind}")
            values[metric if kind == "none" else f"{metric},{kind}"] = Value(
                float(value), float(error) if isinstance(error, (int, float)) else None
            )
    count = found.get("n-samples", {}).get(name, {}).get("effective", 0)
    return Result(f"harness={name}", values, int(count), {"version": found.get("versions", {}).get(name)})


def _adapter(how: Asked, logprobs: LogProbs, generate: Generate) -> Any:
    base: Any = import_module("lm_eval.api.model").LM

    class Model(base):
        """What the harness talks to."""

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """Of each (context, continuation): log-likelihood, and whether it is the greedy one."""
            rows = []
            for request in requests:
                before, after = encoded(how.tokenizer, *request.args)
                rows.append(cut(how.context(before), after, how.width))
            return [(s.total, s.exact) for s in logprobs(rows)]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """Log-likelihood of each whole text, in windows that do not overlap."""
            rows: list[Row] = []
            counts = []
            for request in requests:
                tokens = how.tokenizer.encode(request.args[0])
                own = list(windows([*how.start, *tokens], how.width, 0))
                rows += own
                counts.append(len(own))
            found = iter(logprobs(rows))
            return [sum(next(found).total for _ in range(n)) for n in counts]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """The continuation of each (context, options)."""
            return generate([_wish(*request.args) for request in requests])

    return Model()


def _wish(prompt: str, options: Mapping[str, Any]) -> tuple[str, tuple[str, ...], int, float]:
    until = options.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
    return prompt, tuple(s for s in stops if s), int(options.get("max_gen_toks", NEW_TOKENS)), temperature
