"""Examples of a task to train on: the prompt of the scorer with its right answer, and loss on the answer alone. PURE.

Trained on with `isotron finetune`, then scored like any other model: what is learnt is to prefer the right words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from isotron.core.errors import refuse
from isotron.data.blend import ANSWERS
from isotron.data.indexed_writer import IndexedWriter
from isotron.data.info import write_info
from isotron.evaluate.choices import Question, encoded, mnli_questions, qqp_questions, race_questions
from isotron.evaluate.options import Asked
from isotron.evaluate.rows import cut

QUESTIONS: dict[str, Callable[[Asked], Iterator[Question]]] = {
    "mnli": mnli_questions,
    "qqp": qqp_questions,
    "race": race_questions,
}


def write_examples(how: Asked, prefix: str | Path) -> int:
    """The pairs PREFIX and PREFIX.answers of a task with answers to choose from; how many examples.

    An example is at most `how.width` tokens with the end of a document, which is learnt too; a prompt that is too long
    loses its beginning.
    """
    count = tokens = 0
    with (
        IndexedWriter(prefix, how.tokenizer.vocab_size) as ids,
        IndexedWriter(f"{prefix}{ANSWERS}", dtype=np.uint8) as to,
    ):
        for question in islice(QUESTIONS[how.name](how), how.limit or None):
            before, after = encoded(how.tokenizer, question.prompt, question.choices[question.right])
            row = cut(how.context(before), [*after, how.tokenizer.eod], how.width - 1)
            ids.add_document(np.asarray(row.tokens))
            to.add_document(np.asarray([0] * row.first + [1] * row.count, dtype=np.uint8))
            count, tokens = count + 1, tokens + len(row.tokens)
        if count == 0:
            raise refuse(f"--task {how.name}={how.path}", "it has no example", "a file with examples")
    described = how.tokenizer.describe()
    write_info(prefix, {"format": 1, "tokenizer": described, "append_eod": False, "documents": count, "tokens": tokens})
    return count
