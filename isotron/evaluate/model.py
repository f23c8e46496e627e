"""The callable that tasks ask, made of a model in any layout.

Rows are sorted by length and dealt to data-parallel ranks in batches; ranks that have fewer compute empty rows, so that
all of them make the same passes. Every rank gives the same rows and gets all answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isotron.core import comm
from isotron.core.batch import Batch
from isotron.core.errors import refuse
from isotron.core.mesh import AXES
from isotron.core.parallel.model import ParallelModel
from isotron.core.parallel.scoring import Scoring
from isotron.evaluate.rows import Row, Scored

BY_LENGTH = ("dynamic", "longrope")  # stretches under which a row's angles follow from the longest row beside it


class ModelScorer:
    """Log-probabilities by the training forward. `size`: rows of a microbatch on one data-parallel rank."""

    def __init__(self, model: ParallelModel, size: int) -> None:
        self.model, self.size = model, size
        self.scoring = Scoring(model)
        self.alike = getattr(model.config, "rope_scaling", "none") in BY_LENGTH

    def __call__(self, rows: Sequence[Row]) -> list[Scored]:
        """The scores of every row, the same on every rank."""
        self._check(rows)
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row.count)
        found_N2 = torch.zeros(starts[-1], 2, dtype=torch.float64, device=self.model.device)
        for step in self._steps(rows):
            batches = [self._batch([rows[i] for i in group]) for group in step]
            for group, batch, scores in zip(step, batches, self.scoring.run(batches), strict=True):
                if scores is not None and self.scoring.speaks:
                    where = self._places(rows, group, starts, batch)
                    found_N2[where] = scores.double()
        comm.all_reduce(found_N2, self.model.mesh.group(*AXES))
        return self._answers(found_N2, starts)

    def _check(self, rows: Sequence[Row]) -> None:
        cfg = self.model.config
        longest = max((len(row.tokens) - 1 for row in rows), default=0)
        if cfg.max_position_embeddings and longest > cfg.max_position_embeddings:
            case = f"the model has {cfg.max_position_embeddings} positions"
            raise refuse(f"a row of {longest} tokens", case, f"--seq-length {cfg.max_position_embeddings}")
        for row in rows:
            outside = [t for t in row.tokens if not 0 <= t < cfg.vocab_size]
            if outside:
                case = f"the model's tokens are 0..{cfg.vocab_size - 1}, and a text has the token {outside[0]}"
                raise refuse("--task", case, "--tokenizer-model with the tokenizer that the model was trained with")

    def _steps(self, rows: Sequence[Row]) -> list[list[list[int]]]:
        """This rank's microbatches, as numbers of rows, in groups of as many as a pipeline takes at once."""
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].tokens), i))
        groups: list[list[int]] = []
        for i in order:
            fits = groups and len(groups[-1]) < self.size
            if fits and (not self.alike or len(rows[groups[-1][0]].tokens) == len(rows[i].tokens)):
                groups[-1].append(i)
            else:
                groups.append([i])
        dp, many = self.model.mesh.group("dp"), self.scoring.microbatches
        mine = groups[dp.index :: dp.size]
        per_rank = -(-len(groups) // (dp.size * many)) * many
        mine += [[] for _ in range(per_rank - len(mine))]
        return [mine[i : i + many] for i in range(0, per_rank, many)]

    def _batch(self, rows: Sequence[Row]) -> Batch:
        """Rows side by side, padded on the right; a padded place has the row's last position and no loss."""
        unit = self.scoring.unit
        width = max((len(row.tokens) - 1 for row in rows), default=1)
        width = -(-width // unit) * unit
        shape = (max(1, len(rows)), width)
        tokens, labels = torch.zeros(2, *shape, dtype=torch.long)
        mask = torch.zeros(shape)
        positions = torch.arange(width).repeat(shape[0], 1)
        for i, row in enumerate(rows):
            ids, n = torch.tensor(row.tokens, dtype=torch.long), len(row.tokens) - 1
            tokens[i, :n], labels[i, :n] = ids[:-1], ids[1:]
            mask[i, row.first - 1 : n] = 1
            positions[i].clamp_(max=n - 1)
        if not rows:
            positions.zero_()
        return Batch(tokens, labels, mask, positions, torch.arange(shape[0])).to(self.model.device)

    def _places(self, rows: Sequence[Row], group: Sequence[int], starts: Sequence[int], batch: Batch) -> Tensor:
        """Where the scores of the slots that this rank holds belong among those of all rows."""
        (local,) = self.model.local([batch])
        which, slot = (local.loss_mask != 0).nonzero(as_tuple=True)
        at = local.positions[which, slot].cpu()
        begin = torch.tensor([starts[i] - (rows[i].first - 1) for i in group], dtype=torch.long)
        return (begin[which.cpu()] + at).to(batch.tokens.device)

    def _answers(self, found_N2: Tensor, starts: Sequence[int]) -> list[Scored]:
        logprobs, greedy = found_N2[:, 0].tolist(), (found_N2[:, 1] > 0.5).tolist()
        if not bool(found_N2[:, 0].isfinite().all()):
            fix = "--dtype float32 if this was a narrower type; else an earlier step, this one may have diverged"
            raise refuse("log-probabilities", "the model gives logits that are not finite numbers", fix, exit_code=1)
        return [Scored(logprobs[a:b], greedy[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
