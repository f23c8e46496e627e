"""Where two models part: activations after the embedding, every block and the final norm, and logits.

A model is a run, a step, a Hugging Face directory, or that directory as `transformers` computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isotron.core.batch import Batch
from isotron.core.checkpoint.weights import load_weights
from isotron.core.errors import refuse
from isotron.core.mesh import Mesh
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.plan import Layout
from isotron.hub.folder import open_folder
from isotron.hub.locate import local_path
from isotron.hub.opened import open_model

Activations = dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """One activation: the largest difference, the largest value of the second model, and whether they are close."""

    what: str
    difference: float
    largest: float
    close: bool


def our_activations(path: str, tokens_BS: Tensor, dtype: torch.dtype) -> Activations:
    """What our model of a directory computes on one process, by name of the place."""
    opened = open_model(local_path(path))
    if hasattr(opened.model, "encoder_num_layers"):
        case = f"family {opened.model.family} reads two streams of tokens, and compare has one"
        raise refuse(f"compare {path}", case, "a model with a decoder alone")
    _check_tokens(path, tokens_BS, opened.model)
    model = ParallelModel(opened.model, Layout(dp=1), Mesh(), dtype, torch.device("cpu"), 0)
    load_weights(model, opened.source)
    opened.close()
    (stage,) = model.stages.values()
    module: Any = stage.module.eval()
    found: Activations = {}
    with ExitStack() as hooks, torch.no_grad():
        places = {"embedding": module.dropout, "final norm": module.norm}
        places |= {f"layer {i}": block for i, block in module.layers.items()}
        for name, part in places.items():
            hooks.callback(part.register_forward_hook(_keeper(found, name)).remove)
        _, logits = module.logits(_batch(tokens_BS), {})
    return _ordered({**found, "logits": logits[..., : opened.model.vocab_size]})


def their_activations(path: str, tokens_BS: Tensor, dtype: torch.dtype) -> Activations:
    """What `transformers` computes from a Hugging Face directory; it does not show the last block before the norm."""
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise refuse(
            "compare with transformers", f"the package is not there: {error}", "pip install transformers"
        ) from error
    where = local_path(path)
    masked = open_folder(where).spelling.ARCHITECTURE.endswith("MaskedLM")
    kind = library.AutoModelForMaskedLM if masked else library.AutoModelForCausalLM
    with torch.no_grad():
        out = kind.from_pretrained(where, dtype=dtype).eval()(tokens_BS, output_hidden_states=True)
    states = [*out.hidden_states, *([None] if masked else [])]  # no norm stands behind an encoder's blocks
    found = {"embedding": states[0], "final norm": states[-1], "logits": out.logits}
    found |= {f"layer {i}": state for i, state in enumerate(states[1:-1])}
    return _ordered({name: x for name, x in found.items() if x is not None})


def _keeper(found: Activations, name: str) -> Callable[..., None]:
    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        found[name] = output.detach()

    return keep


def _ordered(found: Activations) -> Activations:
    """In the order of computation."""
    layers = sorted((n for n in found if n.startswith("layer ")), key=lambda n: int(n.split()[1]))
    return {name: found[name] for name in ("embedding", *layers, "final norm", "logits") if name in found}


def _batch(tokens_BS: Tensor) -> Batch:
    positions = torch.arange(tokens_BS.shape[1]).expand(tokens_BS.shape)
    ids = torch.arange(tokens_BS.shape[0])
    return Batch(tokens_BS, tokens_BS, torch.ones(tokens_BS.shape), positions, ids)


def _check_tokens(path: str, tokens_BS: Tensor, cfg: Any) -> None:
    longest, largest = tokens_BS.shape[1], int(tokens_BS.max())
    if cfg.max_position_embeddings and longest > cfg.max_position_embeddings:
        case = f"the model has {cfg.max_position_embeddings} positions"
        raise refuse(f"{longest} tokens for {path}", case, f"--tokens {cfg.max_position_embeddings}, or a shorter text")
    if largest >= cfg.vocab_size:
        raise refuse(
            f"token {largest} for {path}", f"the model has {cfg.vocab_size} entries", "a text of its tokenizer"
        )


def differences(a: Activations, b: Activations, tolerance: float) -> list[Difference]:
    """Place by place, where both have one; shapes must be the same, or the models are not comparable."""
    found = []
    for name in (n for n in a if n in b):
        one, two = a[name].double(), b[name].double()
        if one.shape != two.shape:
            case = f"{name} has shape {list(one.shape)} in the first and {list(two.shape)} in the second"
            raise refuse("compare two models", case, "two checkpoints of models with the same sizes")
        worst, largest = float((one - two).abs().max()), float(two.abs().max())
        found.append(Difference(name, worst, largest, math.isfinite(worst) and worst <= tolerance * largest))
    return found
