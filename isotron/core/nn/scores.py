"""Log-probabilities of given tokens, without the loss: what evaluation asks of the output layer.

Legend: N tokens that count, V vocabulary rows held here, R ranks that split the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isotron.core.nn.logits import CHUNK_BYTES, Vocab
from isotron.core.nn.loss import Head


@torch.no_grad()
def label_scores(head: Head, x_BSD: Tensor, labels_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """[N, 2] where the mask is not 0, row by row: the label's log-probability in nats, and 1 where it is the likeliest
    token (of equals the lowest id), else 0. float32 or wider; the same on every rank that splits the vocabulary."""
    full_BSD = x_BSD if head.enter is None else head.enter.forward(x_BSD).wait()
    counts = mask_BS.flatten() != 0
    rows_ND, labels_N = full_BSD.flatten(0, 1)[counts], labels_BS.flatten()[counts]
    weight, bias, softcap = *head.held(), head.softcap
    wide = torch.promote_types(rows_ND.dtype, torch.float32)
    found_N2 = torch.empty(len(labels_N), 2, dtype=wide, device=rows_ND.device)
    step = max(16, CHUNK_BYTES // (wide.itemsize * max(1, head.weight.shape[0])))
    for start in range(0, len(labels_N), step):
        part = slice(start, start + step)
        logits_NV = torch.nn.functional.linear(rows_ND[part], weight, bias).to(wide)
        if softcap:
            logits_NV = logits_NV.div_(softcap).tanh_().mul_(softcap)
        found_N2[part] = _scores(logits_NV, labels_N[part], head.vocab)
    return found_N2


def _scores(logits_NV: Tensor, labels_N: Tensor, vocab: Vocab | None) -> Tensor:
    first = 0 if vocab is None else vocab.first
    width = logits_NV.shape[1]
    if width:
        best_N = logits_NV.argmax(1)
        top_N = logits_NV.gather(1, best_N[:, None])[:, 0]
        total_N = (logits_NV - top_N[:, None]).exp_().sum(1)
        local_N = labels_N - first
        inside_N = (local_N >= 0) & (local_N < width)
        target_N = logits_NV.gather(1, local_N.clamp(0, width - 1)[:, None])[:, 0].masked_fill(~inside_N, 0)
    else:  # this rank holds padding only
        total_N = target_N = logits_NV.new_zeros(len(labels_N))
        top_N, best_N = torch.full_like(total_N, -torch.inf), torch.zeros_like(labels_N)
    if vocab is not None:
        ids_N = (best_N + first).to(logits_NV.dtype)  # exact: no vocabulary has 2^24 entries
        tops_RN, totals_RN, targets_RN, ids_RN = vocab.gather(torch.stack((top_N, total_N, target_N, ids_N))).unbind(1)
        top_N = tops_RN.amax(0)
        total_N = (totals_RN * (tops_RN - top_N).exp()).sum(0)
        target_N = targets_RN.sum(0)
        best_N = ids_RN.masked_fill(tops_RN < top_N, torch.inf).amin(0).to(labels_N.dtype)
    return torch.stack((target_N - top_N - total_N.log(), (best_N == labels_N).to(target_N.dtype)), 1)
