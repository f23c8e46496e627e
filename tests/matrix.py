"""The axes of the float64 matrix, and one case of it as the core's own configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from isotron.core.models.gpt_config import GPTConfig
from isotron.core.models.llama_config import LlamaConfig
from isotron.core.parallel.pipeline.registry import SCHEDULES
from isotron.core.parallel.plan import Layout
from isotron.core.parallel.split import even_counts
from isotron.train.verify import Case, Measured, compare, measure
from tests.covering import Case as Choice

LAYOUTS: dict[str, dict[str, int | bool]] = {
    "1": {},
    "TP2": {"tp": 2},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "TP4": {"tp": 4},
    "TP4+SP": {"tp": 4, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP4": {"pp": 4},
    "PP2x2chunks": {"pp": 2, "vpp": 2},
    "DP2": {"dp": 2},
    "DP4": {"dp": 4},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "TP2+SPxPP2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "TP2xDP2": {"tp": 2, "dp": 2},
    "PP2xDP2": {"pp": 2, "dp": 2},
    "TP2xPP2xDP2": {"tp": 2, "pp": 2, "dp": 2},
}

# 5 blocks do not divide by 2 or 4 stages; a vocabulary of 131 does not divide by anything
MODELS = {
    "gpt": GPTConfig(5, 32, 4, vocab_size=131, max_position_embeddings=16),
    "llama": LlamaConfig(5, 32, 4, 2, 16, 48, 131, 16),
    "llama-tied": LlamaConfig(4, 32, 4, 2, 0, 48, 131, 16, tie_embeddings=True),
}

AXES = {
    "layout": tuple(LAYOUTS),
    "model": tuple(MODELS),
    "microbatch": (1, 2),
    "zero": (0, 1),
    "recompute": ("none", "selective", "full"),
    "schedule": ("1f1b", "gpipe"),
    "overlap": (True, False),
    "mlp_chunks": (1, 3),
    "messages": ("memory", "turns", "gloo"),
    "halves": (False, True),
}


def legal(choice: Choice) -> bool:
    """GPipe has one stage per rank; one stage has nobody to share a block with."""
    layout = LAYOUTS[choice["layout"]]
    return not (layout.get("vpp") and choice["schedule"] == "gpipe") and ("pp" in layout or not choice["halves"])


def layout_of(choice: Choice) -> Layout:
    """The layout of a choice. Buckets are small, so that every stage has several."""
    sizes = LAYOUTS[choice["layout"]]
    overlap = choice["overlap"]
    found = Layout(
        **{"dp": 1, **sizes},  # type: ignore[arg-type]
        zero=choice["zero"],
        schedule="auto" if "vpp" in sizes else choice["schedule"],
        recompute=choice["recompute"],
        mlp_chunks=choice["mlp_chunks"],
        make_vocab_size_divisible_by=8,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        ddp_bucket_size=3000,
    )
    return with_halves(found, MODELS[choice["model"]].num_layers) if choice["halves"] else found


def with_halves(layout: Layout, blocks: int) -> Layout:
    """Every stage but the last ends half a block before it would."""
    even = even_counts(blocks, layout.stages)
    return replace(layout, layers_per_stage=(even[0] - 0.5, *even[1:-1], even[-1] + 0.5))


def case_of(choice: Choice, steps: int = 2) -> Case:
    """Some steps of samples of 16 tokens: four, or eight where more than two ranks deal samples or pass them on."""
    layout, micro = layout_of(choice), choice["microbatch"]
    batch = 8 if layout.dp * layout.pp * micro > 2 else 4
    return Case(MODELS[choice["model"]], layout, sequence=16, micro_batch=micro, global_batch=batch, steps=steps)


def as_reference(case: Case) -> Case:
    """The same model and data on one process, one sample at a time, without padding, recompute or faults."""
    layout = Layout(dp=1, make_vocab_size_divisible_by=1)
    return replace(case, layout=layout, micro_batch=1, inject="")


@lru_cache(maxsize=64)
def _measured(case: Case) -> Measured:
    return measure(case)


def reference_of(case: Case) -> Measured:
    """What one process gives; kept for the next layout of the same model and data."""
    return _measured(as_reference(case))


def faults(found: Measured, reference: Measured, tolerance: float = 1e-9) -> list[str]:
    """The rows that do not pass, worst first, as text."""
    bad = [row for row in compare(found, reference, tolerance) if not row.passes]
    bad.sort(key=lambda row: -row.difference / row.scale)
    return [f"{row.what}: {row.difference:.3g} of {row.scale:.3g}" for row in bad]


def scheduled(layout: Layout, schedule: str, pp: int = 2) -> tuple[Layout, int]:
    """The layout on `pp` ranks under a schedule with the fewest chunks that it takes, and how many stages it makes."""
    chunks = 1 if SCHEDULES[schedule].per_rank == "one" else 2
    vpp = chunks if SCHEDULES[schedule].per_rank == "several" else 1
    return replace(layout, pp=pp, schedule=schedule, vpp=vpp), pp * chunks


def equals_one_process(
    ranks: Callable[..., list[Any]], case: Case, name: str, body: Callable[[Case], Measured] = measure
) -> None:
    """The matrix's judgement of a case, which `body` measures on the ranks: nothing differs from one process."""
    bad = faults(ranks(case.layout.world, body, case, timeout=120)[0], reference_of(case))
    assert not bad, f"{name}: {len(bad)} rows differ from one process, worst first\n" + "\n".join(bad[:8])
