"""What tests of evaluation share: a tokenizer of letters, models in every layout, the tasks' files in small."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isotron.commands.score_rank import cached_logprobs
from isotron.core.mesh import Mesh
from isotron.core.models.mixtral_config import MixtralConfig
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.evaluate.model import ModelScorer
from isotron.evaluate.options import Asked
from isotron.evaluate.rows import Row
from isotron.evaluate.tasks import evaluate
from isotron.train.verify import randomise
from tests.generation import MODELS

WORDS = "king queen sword crown night day walks sees the a of in , . old new"


FAMILIES = {
    **MODELS,
    "mixtral": MixtralConfig(
        2, 32, 4, 2, ffn_hidden_size=48, vocab_size=131, max_position_embeddings=32, num_experts=4
    ),
}


class Letters:
    """A tokenizer of 131 entries: a letter is a token."""

    vocab_size, eod, bos, eos, pad = 131, 130, None, 130, None
    prefix: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 130 for letter in text]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def asked(name: str, path: Path | str, width: int = 32, **options: Any) -> Asked:
    """A task on a path, with letters as tokens."""
    options.setdefault("begin", ())
    return Asked(name, str(path), Letters(), width=width, **options)  # type: ignore[arg-type]


def write(directory: Path) -> dict[str, Path]:
    """Small files in the official formats; numbers of examples that no layout divides."""
    draw = random.Random(5)

    def words(n: int) -> str:
        return " ".join(draw.choice(WORDS.split()) for _ in range(n))

    places = {name: directory / name for name in ("wikitext103", "lambada", "perplexity", "mnli", "qqp", "race")}
    wiki = f" \n = {words(2)} = \n \n {words(30)} @-@ {words(5)} 's ( {words(3)} ) . \n {words(20)} . \n"
    places["wikitext103"].write_text(wiki, encoding="utf-8")
    for name, count in (("lambada", 7), ("perplexity", 5)):
        lines = [json.dumps({"text": words(draw.randrange(3, 13))}) for _ in range(count)]
        places[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    head, kinds = "\t".join(f"c{i}" for i in range(16)), ("entailment", "neutral", "contradiction")
    mnli = [["0"] * 8 + [words(4), words(3)] + ["-"] * 5 + [draw.choice(kinds)] for _ in range(5)]
    places["mnli"].write_text("\n".join([head, *map("\t".join, mnli)]) + "\n", encoding="utf-8")
    qqp = [[str(i), "1", "2", words(4), words(3), draw.choice("01")] for i in range(5)]
    qqp_head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    places["qqp"].write_text("\n".join([qqp_head, *map("\t".join, qqp)]) + "\n", encoding="utf-8")
    places["race"].mkdir()
    for i in range(2):
        passage = {
            "article": words(8), "id": f"{i}.txt", "answers": ["C", "A"],
            "questions": [f"{words(3)} ?", f"{words(2)} _ {words(1)} ."],
            "options": [[words(1 + j) for j in range(4)] for _ in range(2)],
        }  # fmt: skip
        (places["race"] / f"{i}.txt").write_text(json.dumps(passage), encoding="utf-8")
    return places


def make_model(name: str, dtype: torch.dtype = torch.float64, **layout: Any) -> ParallelModel:
    """A model with random weights on the ranks of this world, in any layout of training."""
    cut = Layout(**{"dp": 1, **layout})
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = Mesh(rank, **cut.axes)
    model = ParallelModel(FAMILIES[name], cut, mesh, dtype, torch.device("cpu"), 3)
    randomise(model, 11)
    return model


ROWS = [([(7 * i * i + 3 * j) % 131 for i in range(n)], first)
        for j, (n, first) in enumerate(((10, 1), (5, 4), (33, 20), (7, 2), (12, 11), (2, 1), (20, 3)))]  # fmt: skip


def scored(name: str, layout: dict[str, Any], size: int = 2) -> list[tuple[list[float], list[bool]]]:
    """The scores of ROWS."""
    found = ModelScorer(make_model(name, **layout), size)([Row(*row) for row in ROWS])
    return [(s.logprobs, s.greedy) for s in found]


def results(name: str, layout: dict[str, Any], directory: str) -> list[dict[str, Any]]:
    """Every task on the files of `write`."""
    scorer = ModelScorer(make_model(name, **layout), 2)
    return [
        evaluate(asked(p.name, p, stride=8, strict=True), scorer).as_json() for p in sorted(Path(directory).iterdir())
    ]


def both_paths(name: str, layout: dict[str, Any], rows: list[list[int]]) -> list[list[float]]:
    """Log-probabilities by the training forward, then by the cache, of all rows."""
    model = make_model(name, **layout)
    training = [s.logprobs for s in ModelScorer(model, 2)([Row(row, 1) for row in rows])]
    return [*training, *cached_logprobs(model, rows, chunk=3, page=4)]
