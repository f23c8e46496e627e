"""Losses that keep experts evenly used, as sums over sequences.

Legend: B batch, S sequence (its local part), E experts.

The balance loss of a sequence is E * sum_i f_i P_i, with f_i the part of visits that go to expert i and P_i its mean
share of the scores; it is 1 when both are even. Only P has a gradient. What f is counted over is the kind of the loss:
the sequence itself, the microbatch, or all tokens of the step. Sums over sequences enter the total with one weight, so
that neither the layout nor the size of a microbatch changes them (but for the kind `batch`, whose f is the
microbatch's). Sources: Fedus et al. 2021, section 2.2; Zoph et al. 2022, section 3.1; Qiu et al. 2025 (global counts).
"""

from __future__ import annotations

from torch import Tensor

from isotron.core.nn.moe_config import MoEConfig


class Balance:
    """The balance loss that a model asks for. `frequencies`: what is counted before a step, f of all its tokens under
    `global`, [E]; f of each row of the global batch, [R, E], where documents were laid into new rows.
    """

    def __init__(self, cfg: MoEConfig) -> None:
        self.kind = cfg.moe_router_load_balancing_type
        self.active = self.kind in ("sequence", "batch", "global") and cfg.moe_aux_loss_coeff != 0
        self.frequencies: Tensor | None = None

    def __call__(self, shares_BSE: Tensor, f_BE: Tensor, length: int) -> Tensor:
        """Sum over sequences. `shares_BSE`: scores that sum to 1 over the experts; `length`: of whole sequences."""
        if self.kind == "batch":
            f_BE = f_BE.mean(0, keepdim=True)
        elif self.kind == "global" and self.frequencies is not None:
            f_BE = self.frequencies.to(f_BE)[None]
        return shares_BSE.shape[2] * (f_BE * shares_BSE.sum(1) / length).sum()

    def anew(self, shares_BSE: Tensor, rows_BS: Tensor, length: int) -> Tensor:
        """The same over tokens of rows `rows_BS` of the global batch, each `length` long; -1 are none."""
        f = shares_BSE.new_zeros(1) if self.frequencies is None else self.frequencies.to(shares_BSE)
        f_BSE = f[rows_BS.clamp_min(0)] if f.dim() == 2 else f
        real_BS1 = (rows_BS >= 0)[..., None]
        return shares_BSE.shape[2] * (f_BSE * shares_BSE * real_BS1).sum() / length


def z_values(logits_BSE: Tensor, length: int, real_BS: Tensor | None = None) -> Tensor:
    """Sum over sequences of the mean square of log-sum-exp. `real_BS`: the tokens that count, all without it."""
    squares_BS = logits_BSE.logsumexp(-1).square()
    return (squares_BS if real_BS is None else squares_BS * real_BS).sum() / length
