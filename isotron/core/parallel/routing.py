"""What a step knows about the routing of all its tokens: sums over ranks, counts before the step, biases after it.

Terms of blocks with experts are sums over the tokens that a rank sees: every rank's part counts under sequence
parallelism, one tensor-parallel rank's without it. Names and sizes follow from the config, so all ranks agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.mesh import AXES, Group
from isotron.core.nn.router import Router
from isotron.core.parallel.model import ParallelModel


def routers(model: ParallelModel) -> list[Router]:
    """The routers of this rank's stages."""
    return [m for stage in model.stages.values() for m in stage.module.modules() if isinstance(m, Router)]


def sum_aux(model: ParallelModel, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every further term of the loss, summed over the layout, the same on every rank; empty for a model without."""
    return _summed(model, terms, getattr(model.config, "aux_terms", {}), model.mesh.group(*AXES))


def _summed(
    model: ParallelModel, terms: Mapping[str, Tensor], sizes: Mapping[str, int], group: Group
) -> dict[str, Tensor]:
    if not sizes:
        return {}
    flat = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=model.device)
    parts = dict(zip(sizes, flat.split(list(sizes.values())), strict=True))
    first = model.mesh.coordinate["tp"] == 0
    for name, part in parts.items():
        # the output layer sees whole sequences on every rank, a router the rank's part
        counts = first or (model.layout.sequence_parallel and not name.startswith("mtp/"))
        if name in terms and counts:
            part.copy_(terms[name].reshape(-1))
    comm.all_reduce(flat, group)
    return parts


def count_visits(model: ParallelModel, batches: Sequence[Batch]) -> None:
    """Before a step whose balance loss compares what no rank sees at once, the whole step or rows that were dealt
    anew: one forward to count the visits of all its tokens.
    """
    kind, origin = getattr(model.config, "moe_router_load_balancing_type", ""), batches[0].origin
    if not getattr(model.config, "moe_aux_loss_coeff", 0) or not (
        kind == "global" or (kind == "sequence" and origin is not None)
    ):
        return
    found = routers(model)
    for r in found:
        r.balance.frequencies = None
    rows = 1 if kind == "global" or origin is None else origin.rows
    what = "load" if kind == "global" else "visits"
    terms = model.forward_only(batches)
    sizes = {f"{what}/{r.name}": rows * r.cfg.num_experts for r in found}
    summed = _summed(model, terms, sizes, model.mesh.group_of(model.mesh.ranks_along("tp", "cp", "dp")))
    for r in found:
        visits_RE = summed[f"{what}/{r.name}"].view(rows, -1)
        f_RE = visits_RE / visits_RE.sum(1, keepdim=True)
        r.balance.frequencies = f_RE[0] if kind == "global" else f_RE


@torch.no_grad()
def move_biases(model: ParallelModel, aux: Mapping[str, Tensor]) -> None:
    """After a step: an expert that was visited more often than the mean is chosen less, by one rate, and vice versa."""
    for r in routers(model):
        if r.cfg.moe_router_enable_expert_bias:
            load = aux[f"load/{r.name}"]
            r.expert_bias += r.cfg.moe_router_bias_update_rate * torch.sign(load.mean() - load).to(r.expert_bias)


def described(aux: Mapping[str, Tensor], sequences: int, tokens: float) -> dict[str, Any]:
    """The terms as they are reported: balance and z as means over sequences, per layer and over all layers; visits of
    every expert; the busiest expert's share of the mean.
    """
    found: dict[str, Any] = {}
    means: dict[str, list[float]] = {}
    for name, value in aux.items():
        kind, _, layer = name.partition("/")
        layer = layer.removeprefix("layers.")
        if kind == "load":
            found[f"tokens_per_expert/{layer}"] = [int(n) for n in value.tolist()]
            found[f"max_load/{layer}"] = float(value.max() / value.mean())
        elif kind == "dropped":
            found[f"dropped/{layer}"] = float(value)
        else:
            per = tokens if kind == "mtp" else sequences
            found[name.replace("layers.", "")] = float(value) / max(per, 1)
            means.setdefault(kind, []).append(float(value) / max(per, 1))
    return {**{kind: sum(v) / len(v) for kind, v in means.items()}, **found}
