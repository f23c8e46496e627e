"""Why each communication of a step is there, by its function and the file that calls it. PURE.

A test holds that every call in the core has its line here.
"""

from __future__ import annotations

REASONS: dict[tuple[str, str], str] = {
    ("all_reduce", "core/parallel/model.py"): "tokens counted before the step, its loss summed after it",
    ("all_reduce", "core/optim/clip.py"): "one norm of all gradients",
    ("all_to_all", "core/optim/muon.py"): "pieces of a matrix to the rank that steps it, the result back",
    ("all_to_all", "core/optim/spread.py"): "sums over rows and columns of whole matrices",
    ("gather_flat", "core/optim/spread.py"): "these sums to all ranks of the stage",
    ("gather_json", "core/optim/spread.py"): "who holds which pieces",
    ("broadcast_json", "core/optim/spread.py"): "the same to all",
    ("all_reduce", "core/parallel/tensor.py"): "sums of layers split by inputs, and of input gradients",
    ("all_gather", "core/parallel/tensor.py"): "whole sequences for a split layer, or numbers of the split vocabulary",
    ("reduce_scatter", "core/parallel/tensor.py"): "sums of layers, each rank keeps its part of the sequence",
    ("all_gather", "core/parallel/keep.py"): "the input of a recomputed unit, kept in shares",
    ("exchange", "core/parallel/pipeline/runtime.py"): "activations to the next stage, their gradients back",
    ("reduce_flat", "core/parallel/shards.py"): "gradients summed at the rank that steps them",
    ("all_reduce", "core/parallel/shards.py"): "gradients summed over ranks that hold the same",
    ("gather_flat", "core/parallel/shards.py"): "weights to the ranks that use them",
    ("all_reduce", "core/parallel/data.py"): "gradients of which each rank or stage has a part",
    (
        "exchange",
        "core/parallel/context_ring.py",
    ): "keys and values of other parts of the sequence, and their gradients",
    ("all_gather", "core/parallel/context_ring.py"): "keys and values of the whole sequence",
    ("reduce_scatter", "core/parallel/context_ring.py"): "gradients of keys and values to their part of the sequence",
    ("all_to_all", "core/parallel/context_heads.py"): "heads for slots, and back",
    ("all_gather", "core/parallel/all_to_all.py"): "how many rows each rank gets of each expert",
    ("all_to_all", "core/parallel/all_to_all.py"): "tokens to the ranks of their experts, and back",
    ("all_gather", "core/parallel/shared_tokens.py"): "shares of tokens that every rank holds, put together again",
    ("all_reduce", "core/parallel/expert.py"): "visits of each sequence for its balance loss",
    ("all_gather", "core/parallel/expert.py"): "choices of whole sequences",
    ("all_reduce", "core/parallel/routing.py"): "visits of experts and further terms of the loss",
    ("gather_json", "core/parallel/replicas.py"): "fingerprints of weights that must be equal",
    ("broadcast_json", "core/parallel/replicas.py"): "whether they are",
}


def reason(function: str, file: str) -> str:
    """The reason, or the file that would know it."""
    return REASONS.get((function, file), f"called by {file}")
