"""What an engine cannot do, said before the first pass and alike on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isotron.core.errors import Problem, Refused
from isotron.core.parallel.model import ParallelModel
from isotron.inference.config import Wish


def check_model(model: ParallelModel) -> None:
    """Refuses layouts that generation cannot run in."""
    layout, sizes = model.layout, model.mesh.sizes
    rules = (
        (sizes["dp"] > 1, f"--dp {sizes['dp']}", "data-parallel ranks would each generate the same", "--dp 1"),
        (layout.vpp > 1, f"--vpp {layout.vpp}", "one token at a time gives several stages per rank no use", "--vpp 1"),
        (layout.sequence_parallel and layout.tp > 1, "--sequence-parallel",
         "a pass of one token has no sequence to split", "--no-sequence-parallel"),
    )  # fmt: skip
    problems = [
        Problem(f"generate with {asked}", case, f"{fix}: inference_layout(layout) sets it")
        for broken, asked, case, fix in rules
        if broken
    ]
    if problems:
        raise Refused(problems)


def check_request(config: Any, rows: Sequence[Sequence[int]], wish: Wish) -> None:
    """Refuses values out of range, ids outside the vocabulary, and rows longer than the model; all of them at once."""
    problems = wish.problems()
    for token in (*wish.ending.stop_ids, *(t for t, _ in wish.sampling.logit_bias)):
        if not 0 <= token < config.vocab_size:
            case = f"the model's tokens are 0..{config.vocab_size - 1}"
            problems.append(Problem(f"--stop-ids or --logit-bias with token {token}", case, "a token of the model"))
    for i, row in enumerate(rows):
        problems += _row_problems(config, i, row, max(wish.ending.max_new_tokens, 1))
    if problems:
        raise Refused(problems)


def _row_problems(config: Any, number: int, row: Sequence[int], new: int) -> list[Problem]:
    problems = []
    outside = [token for token in row if not 0 <= token < config.vocab_size]
    if outside:
        case = f"it has the token {outside[0]}, the model's are 0..{config.vocab_size - 1}"
        problems.append(Problem(f"prompt {number}", case, "the tokenizer that the model was trained with"))
    limit = config.max_position_embeddings
    if limit and len(row) + new > limit:
        asked = f"--max-new-tokens {new} after prompt {number} of {len(row)} tokens"
        case = f"together {len(row) + new} tokens, and the model's limit max_position_embeddings is {limit}"
        room = limit - len(row)
        fix = f"--max-new-tokens {room}" if room > 0 else f"a prompt of at most {limit - 1} tokens"
        problems.append(Problem(asked, case, fix))
    return problems
