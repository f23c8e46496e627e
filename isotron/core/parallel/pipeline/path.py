"""The critical path: the chain of actions and transfers that a simulated step cannot be shorter than. PURE."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from isotron.core.parallel.pipeline.actions import Action, Kind
from isotron.core.parallel.pipeline.simulate import Report, Span, Travel

Link = tuple[int, Span | Travel]


def critical_path(report: Report) -> list[Link]:
    """(rank, span or travel) from the first to the last link; each begins when the one before it ends.

    Where several chains are equally long, the one that stays on a rank longest.
    """
    rank = max(range(len(report.spans)), key=lambda r: report.spans[r][-1].end if report.spans[r] else 0)
    if not report.spans[rank]:
        return []
    makers = _makers(report)
    before = {(r, b.action): a for r, row in enumerate(report.spans) for a, b in zip(row, row[1:], strict=False)}
    coming = {_user(t): t for t in report.travels}
    ends = [[span.end for span in row] for row in report.spans]
    link: Link | None = (rank, report.spans[rank][-1])
    path: list[Link] = []
    while link is not None:
        path.append(link)
        here = link[1]
        link = _cause(link, makers, before, coming) if isinstance(here, Span) else _start(here, makers, report, ends)
    return path[::-1]


Key = tuple[Kind, int, int | None]


def _makers(report: Report) -> dict[Key, Link]:
    return {
        (part.kind, part.stage, part.microbatch): (rank, span)
        for rank, row in enumerate(report.spans)
        for span in row
        for part in span.action.parts
    }


def _user(travel: Travel) -> Key:
    """The compute action that needs what travels."""
    forward = travel.action.kind is Kind.SEND_F
    return Kind.F if forward else Kind.B, travel.action.stage + (1 if forward else -1), travel.action.microbatch


def _start(travel: Travel, makers: dict[Key, Link], report: Report, ends: list[list[float]]) -> Link:
    """What a transfer waited for: its tensor, or the end of computing that stood before one of its two calls."""
    kind = Kind.F if travel.action.kind is Kind.SEND_F else Kind.B
    ended: list[Link] = []
    for rank in (travel.source, travel.target):
        done = bisect_right(ends[rank], travel.start + 1e-9 * max(1.0, travel.start))
        if done:  # the first of those that end last
            ended.append((rank, report.spans[rank][bisect_left(ends[rank], ends[rank][done - 1])]))
    return max([*ended, makers[kind, travel.action.stage, travel.action.microbatch]], key=_late)


def _cause(
    link: Link, makers: dict[Key, Link], before: dict[tuple[int, Action], Span], coming: dict[Key, Travel]
) -> Link | None:
    """What ended when a compute action began."""
    rank, here = link
    candidates: list[Link] = []
    if (rank, here.action) in before:
        candidates.append((rank, before[rank, here.action]))
    for part in here.action.parts:
        key = (part.kind, part.stage, part.microbatch)
        if key in coming:
            candidates.append((coming[key].target, coming[key]))
        step = -1 if part.kind is Kind.F else 1
        neighbour = (part.kind, part.stage + step, part.microbatch)
        if part.kind in (Kind.F, Kind.B) and key not in coming and neighbour in makers:
            candidates.append(makers[neighbour])
    return max((c for c in candidates if _ends_by(c[1], here)), key=_late, default=None)


def _ends_by(first: Span | Travel, then: Span | Travel) -> bool:
    return first.end <= then.start + 1e-9 * max(1.0, then.start)


def _late(link: Link) -> float:
    return link[1].end
