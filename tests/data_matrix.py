"""The axes of the float64 matrix of rows that come from data files: packed, rearranged, with documents in a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from isotron.core.batch import Batch
from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.plan import Layout
from isotron.data.batches import make_batch
from isotron.data.blend import ANSWERS
from isotron.data.build import build_datasets
from isotron.data.config import DataConfig
from isotron.data.indexed_writer import IndexedWriter
from isotron.train.verify import Case
from tests.covering import Case as Choice

EOD, VOCAB, SEQUENCE = 130, 131, 16
MODELS = {
    "gpt": GPTConfig(2, 32, 4, vocab_size=VOCAB, max_position_embeddings=SEQUENCE),
    "llama": LlamaConfig(2, 32, 8, 2, 0, 48, VOCAB, SEQUENCE),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "CP2": {"cp": 2},
    "DP2": {"dp": 2},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "CP2xDP2": {"cp": 2, "dp": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {"pack_documents": True},
    "answers": {"pack_documents": True},  # loss on some labels alone
    "isolated": {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
    "fim": {"fim_cut": "tokens", "fim_rate": 0.7, "fim_token_ids": (127, 128, 129)},
    "fim of isolated": {
        "fim_cut": "tokens",
        "fim_rate": 0.7,
        "fim_token_ids": (127, 128, 129),
        "reset_attention_mask": True,
    },
}
AXES = {
    "rows": tuple(OPTIONS),
    "layout": ("TP2+SP", "PP2", "CP2", "DP2"),
    "model": tuple(MODELS),
    "microbatch": (1, 2),
    "zero": (0, 1, 2, 3),
}


def legal(choice: Choice) -> bool:
    """Context parallelism deals only rotary positions; shards need ranks."""
    return not (choice["layout"] == "CP2" and choice["model"] == "gpt")


@dataclass(frozen=True)
class FromFiles:
    """Samples of a range as a batch, read in each process from a pair of files in `folder`."""

    folder: str
    rows: str

    def __call__(self, numbers: range) -> Batch:
        """The batch."""
        config = self.config
        return make_batch(dataset(self.folder, config), numbers, config, EOD)

    @property
    def config(self) -> DataConfig:
        """How rows are made of the documents."""
        name = "talks" if self.rows == "answers" else "texts"
        return DataConfig((f"{self.folder}/{name}",), seq_length=SEQUENCE, split="1", **OPTIONS[self.rows])


@cache
def dataset(folder: str, config: DataConfig) -> Any:
    return build_datasets(config, 5, (40, 0), lambda _: None, vocab_size=VOCAB, eod=EOD)[0]


def write_files(folder: Path) -> None:
    """Documents of 2 to 24 ids with their end; and the same with loss on half of the ids."""
    random = np.random.RandomState(3)
    documents = [np.append(random.randint(0, 127, random.randint(1, 24)), EOD) for _ in range(60)]
    for name in ("texts", "talks"):
        with IndexedWriter(folder / name, VOCAB) as writer:
            for ids in documents:
                writer.add_document(ids)
    with IndexedWriter(f"{folder}/talks{ANSWERS}", 2) as writer:
        for ids in documents:
            writer.add_document(random.randint(0, 2, len(ids)))


def case_of(choice: Choice, folder: str) -> Case:
    """Two steps of four rows."""
    layout = Layout(
        **{"dp": 1, **LAYOUTS[choice["layout"]]},
        zero=choice["zero"],
        make_vocab_size_divisible_by=8,
        ddp_bucket_size=3000,
    )
    rows = FromFiles(folder, choice["rows"])
    return Case(MODELS[choice["model"]], layout, SEQUENCE, choice["microbatch"], 4, steps=2, rows=rows)
