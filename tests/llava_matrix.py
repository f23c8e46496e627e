"""The float64 matrix of decoders that see pictures: layouts x ZeRO x recompute x microbatches with and without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from isotron.core.batch import Batch
from isotron.core.models.llava_config import LlavaConfig
from isotron.core.parallel.plan import Layout
from isotron.core.random import key
from isotron.train.verify import Case
from tests.covering import OF_A_STEP
from tests.covering import Case as Choice

MARK, VOCAB, SEQUENCE = 7, 131, 16
# 3 blocks of the tower, 3 of the decoder; 4 patches of a picture
MODEL = LlavaConfig(6, 32, 4, 2, 0, 48, VOCAB, SEQUENCE, vision_num_layers=3, vision_hidden_size=24,
                    vision_num_attention_heads=4, vision_ffn_hidden_size=40, image_size=8, patch_size=4,
                    image_token_id=MARK)  # fmt: skip
MODELS = {"untied": MODEL, "tied": LlavaConfig(**{**MODEL.__dict__, "tie_embeddings": True})}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp": 2},
    "DP2": {"dp": 2},
    "PP2-uneven": {"pp": 2, "layers_per_stage": (4, 2)},  # a stage with blocks of both
    "PP4-first two see": {"pp": 4, "layers_per_stage": (1, 2, 2, 1)},  # the tower alone on the first stages
    "TP2xPP2-balanced": {"tp": 2, "pp": 2, "layer_split": "balanced"},
    "PP2x2chunks": {"pp": 2, "vpp": 2},
    "PP2xDP2-zbv": {"pp": 2, "dp": 2, "schedule": "zbv", "deferred_logits": 0},
}
AXES = {"layout": tuple(LAYOUTS), "model": tuple(MODELS), **OF_A_STEP}


@dataclass(frozen=True)
class Rows:
    """Sample n has n % 3 pictures, somewhere in its text."""

    seed: int = 3

    def __call__(self, numbers: range) -> Batch:
        """The batch."""
        rows, images = [], []
        for n in numbers:
            draw = torch.Generator().manual_seed(key(self.seed, "row", n))
            row = torch.randint(8, VOCAB, (SEQUENCE + 1,), generator=draw)
            for i in range(n % 3):
                row[1 + 6 * i : 5 + 6 * i] = MARK
            rows.append(row)
            images.append(torch.randn(n % 3, MODEL.patches, MODEL.pixels, generator=draw))
        tokens = torch.stack(rows)
        mask = (tokens[:, 1:] != MARK).float()
        positions = torch.arange(SEQUENCE).expand(len(rows), -1)
        ids = torch.tensor(list(numbers))
        return Batch(tokens[:, :-1], tokens[:, 1:], mask, positions, ids, images=torch.cat(images))


def case_of(choice: Choice) -> Case:
    """Two steps of four samples: 0, 1, 2, 0 pictures, then 1, 2, 0, 1."""
    uneven = "layers_per_stage" in LAYOUTS[choice["layout"]]
    layout = Layout(
        **{"dp": 1, **LAYOUTS[choice["layout"]]},
        zero=choice["zero"],
        recompute=choice["recompute"],
        recompute_method="block" if uneven else "uniform",
        recompute_num_layers=2 if choice["recompute"] == "full" else 1,
        make_vocab_size_divisible_by=8,
        ddp_bucket_size=3000,
    )
    return Case(MODELS[choice["model"]], layout, SEQUENCE, choice["microbatch"], 4, steps=2, rows=Rows())


def legal(choice: Choice) -> bool:
    """One data-parallel rank has nothing to shard."""
    return choice["zero"] == 1 or LAYOUTS[choice["layout"]].get("dp", 1) > 1
