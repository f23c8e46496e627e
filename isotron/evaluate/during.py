"""Tasks while a model trains: the same scorers on the model as it is, in the layout of its training."""

from __future__ import annotations

from collections.abc import Callable

from isotron.config.schema import RunConfig
from isotron.core.parallel.model import ParallelModel
from isotron.evaluate.model import ModelScorer
from isotron.evaluate.options import Asked
from isotron.evaluate.result import Result
from isotron.evaluate.tasks import evaluate, read_tasks
from isotron.tokenizers.build import build_tokenizer


def during(config: RunConfig, model: ParallelModel) -> Callable[[], list[Result]]:
    """What runs the tasks of `eval_tasks` on a model in training; every rank calls it.

    Windows do not overlap; lambada asks for the last token. The model can be trained on afterwards.
    """
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size)
    scorer = ModelScorer(model, config.train.micro_batch_size)
    width = config.data.seq_length
    asked = [Asked(name, path, tokenizer, (), width) for name, path in read_tasks(config.train.eval_tasks)]
    return lambda: [evaluate(how, scorer) for how in asked]
