"""Questions with a few answers, one of them right: the answer with the highest log-probability is the model's.

| task | prompt                                                     | answers              | source            |
|------|------------------------------------------------------------|----------------------|-------------------|
| mnli | premise, "Question: <hypothesis> True, False or Neither?"  | True, Neither, False | Brown et al. 2020 |
| qqp  | both questions, "Do both questions ask the same thing?"    | no, yes              | the same style    |
| race | article, question (or the sentence with its gap)           | the four options     | Lai et al. 2017   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from isotron.core.errors import refuse
from isotron.evaluate.files import existing, label, passages, table_rows
from isotron.evaluate.options import Asked
from isotron.evaluate.result import Result, Value, mean
from isotron.evaluate.rows import LogProbs, Row, Scored, blocks, cut
from isotron.tokenizers.base import Tokenizer

MNLI_LABELS, QQP_LABELS, RACE_LABELS = ("entailment", "neutral", "contradiction"), ("0", "1"), ("A", "B", "C", "D")


@dataclass(frozen=True)
class Question:
    """`prompt` and each of `choices` are texts that follow each other; `right` is the number of the right one."""

    prompt: str
    choices: tuple[str, ...]
    right: int


def mnli_questions(how: Asked) -> Iterator[Question]:
    """dev_matched.tsv and its like: sentence1 and sentence2 in columns 8 and 9, the gold label last."""
    path = existing(how.name, how.path)
    for line, cells in table_rows(how.name, path, 11):
        right = label(how.name, path, line, cells[-1], MNLI_LABELS)
        prompt = f"{_sentence(cells[8])}\nQuestion: {_sentence(cells[9])} True, False or Neither?\nAnswer:"
        yield Question(prompt, (" True", " Neither", " False"), right)


def qqp_questions(how: Asked) -> Iterator[Question]:
    """train.tsv or dev.tsv: id, qid1, qid2, question1, question2, is_duplicate."""
    path = existing(how.name, how.path)
    for line, cells in table_rows(how.name, path, 6):
        right = label(how.name, path, line, cells[5], QQP_LABELS)
        both = f"Question 1: {cells[3]}\nQuestion 2: {cells[4]}\n"
        yield Question(f"{both}Question: Do both questions ask the same thing?\nAnswer:", (" no", " yes"), right)


def race_questions(how: Asked) -> Iterator[Question]:
    """Files of RACE; a question with a gap (_) is the sentence up to it, and answers stand in it."""
    for file, found in passages(how.name, existing(how.name, how.path)):
        for question, options, answer in zip(found["questions"], found["options"], found["answers"], strict=True):
            right = label(how.name, file, 1, answer, RACE_LABELS[: len(options)])
            before, gap, after = question.partition("_")
            if gap:
                prompt = f"Article: {found['article']}\n\n{before.strip()}".rstrip()
                choices = tuple(f" {option.strip()}{_after(after)}" for option in options)
            else:
                prompt = f"Article: {found['article']}\n\nQuestion: {question.strip()}\nAnswer:"
                choices = tuple(f" {option.strip()}" for option in options)
            yield Question(prompt, choices, right)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _after(text: str) -> str:
    text = text.strip(" _\n")
    return text if not text or text[0] in ".,;:?!" else f" {text}"


def encoded(tokenizer: Tokenizer, prompt: str, choice: str) -> tuple[list[int], list[int]]:
    """Tokens of a text and of what follows it, as they are when both are read together."""
    spaces = len(prompt) - len(prompt.rstrip())
    if spaces:
        prompt, choice = prompt[:-spaces], prompt[-spaces:] + choice
    before = tokenizer.encode(prompt)
    whole = tokenizer.encode(prompt + choice)
    return (before, whole[len(before) :]) if len(whole) > len(before) else (whole[:-1], whole[-1:])


def ranked(how: Asked, logprobs: LogProbs, questions: Iterator[Question]) -> Iterator[tuple[Question, list[Scored]]]:
    """Each question with the scores of its answers."""
    for block in blocks(islice(questions, how.limit or None), 512):
        rows: list[Row] = []
        for question in block:
            for choice in question.choices:
                before, after = encoded(how.tokenizer, question.prompt, choice)
                rows.append(cut(how.context(before), after, how.width))
        found = iter(logprobs(rows))
        yield from ((question, [next(found) for _ in question.choices]) for question in block)


def _judged(how: Asked, logprobs: LogProbs, questions: Iterator[Question]) -> list[tuple[int, int, int]]:
    """(right, by the sum of log-probabilities, by the sum per byte of the answer) of each question."""
    found = []
    for question, scores in ranked(how, logprobs, questions):
        sums = [s.total for s in scores]
        per_byte = [s / len(c.encode()) for s, c in zip(sums, question.choices, strict=True)]
        found.append((question.right, _first(sums), _first(per_byte)))
    if not found:
        raise refuse(f"--task {how.name}={how.path}", "it has no example", "a file with examples")
    return found


def _first(values: list[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def _accuracy(how: Asked, logprobs: LogProbs, read: Callable[[Asked], Iterator[Question]]) -> Result:
    found = _judged(how, logprobs, read(how))
    values = {
        "accuracy": mean([float(right == said) for right, said, _ in found]),
        "accuracy_per_byte": mean([float(right == said) for right, _, said in found]),
    }
    return Result(how.name, values, len(found), {"shots": 0})


def mnli(how: Asked, logprobs: LogProbs) -> Result:
    """Accuracy without any training."""
    return _accuracy(how, logprobs, mnli_questions)


def race(how: Asked, logprobs: LogProbs) -> Result:
    """Accuracy without any training."""
    return _accuracy(how, logprobs, race_questions)


def qqp(how: Asked, logprobs: LogProbs) -> Result:
    """Accuracy, and F1 of the duplicates, without any training."""
    found = _judged(how, logprobs, qqp_questions(how))
    both = sum(right == said == 1 for right, said, _ in found)
    either = sum(right == 1 for right, _, _ in found) + sum(said == 1 for _, said, _ in found)
    values = {
        "accuracy": mean([float(right == said) for right, said, _ in found]),
        "f1": Value(2 * both / either if either else 0.0),
    }
    return Result(how.name, values, len(found), {"shots": 0})
