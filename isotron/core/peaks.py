"""What devices can compute at most: the denominator of model FLOP utilisation. PURE.

Dense rates in TFLOP/s, without sparsity, with float32 accumulation where the vendor tells them apart; float32 is the
plain rate (not TF32), float64 the tensor-core rate where there is one. Sources: the vendors' data sheets and
architecture white papers, named per row. Boards are told apart by the name that the driver reports.
"""

from __future__ import annotations

import re

Rates = dict[str, float]


def _rates(half: float, float32: float, float64: float = 0.0, fp8: float = 0.0, fp4: float = 0.0) -> Rates:
    """One row in TFLOP/s; zero means that the board has no such unit, or that no rate is published."""
    named = {"float16": half, "bfloat16": half, "float32": float32, "float64": float64, "float8": fp8, "float4": fp4}
    return {dtype: rate for dtype, rate in named.items() if rate}


def _without_bfloat16(rates: Rates) -> Rates:
    return {dtype: rate for dtype, rate in rates.items() if dtype != "bfloat16"}


_H100_SXM = _rates(989.4, 66.9, 66.9, 1978.9)

# (words that the name must hold, rates); the first row that fits counts, so special boards stand before plain ones
PEAKS: tuple[tuple[str, Rates], ...] = (
    ("GB300", _rates(2500, 80, 1.3, 5000, 15000)),  # GB300 NVL72 data sheet, per GPU
    ("GB200", _rates(2500, 80, 40, 5000, 10000)),  # GB200 NVL72 data sheet, per GPU
    ("B300", _rates(2250, 75, 1.2, 4500, 14000)),  # HGX B300 data sheet, per GPU
    ("B200", _rates(2250, 75, 37, 4500, 9000)),  # HGX B200 data sheet, per GPU
    ("B100", _rates(1750, 60, 30, 3500, 7000)),  # HGX B100 data sheet, per GPU
    ("GH200", _H100_SXM),  # GH200 data sheet
    ("H200 NVL", _rates(835.5, 60, 60, 1671)),  # H200 data sheet
    ("H200", _H100_SXM),  # H200 data sheet
    ("H100 PCIE", _rates(756.4, 51.2, 51.2, 1512.8)),  # H100 white paper and PCIe data sheet
    ("H100 NVL", _rates(835.5, 60, 60, 1671)),  # H100 data sheet
    ("H100", _H100_SXM),  # H100 white paper, SXM5
    ("H800", _rates(989.4, 66.9, 0.0, 1978.9)),  # H800 data sheet, SXM5
    ("H20", _rates(148, 44, 1, 296)),  # H20 data sheet
    ("A100", _rates(312, 19.5, 19.5)),  # A100 white paper
    ("A800", _rates(312, 19.5, 19.5)),  # A800 data sheet
    ("A30", _rates(165, 10.3, 10.3)),  # A30 data sheet
    ("A40", _rates(149.7, 37.4)),  # A40 data sheet
    ("A10G", _rates(70, 31.5)),  # A10G data sheet
    ("A10", _rates(125, 31.2)),  # A10 data sheet
    ("A6000", _rates(154.8, 38.7)),  # GA102 white paper
    ("L40S", _rates(362.1, 91.6, 0.0, 733)),  # L40S data sheet
    ("L40", _rates(181.1, 90.5, 0.0, 362.1)),  # L40 data sheet
    ("L4", _rates(121, 30.3, 0.0, 242.5)),  # L4 data sheet
    ("RTX 6000 ADA", _rates(364.2, 91.1, 0.0, 728.5)),  # RTX 6000 Ada data sheet
    ("RTX 5090", _rates(209.5, 104.8, 0.0, 419, 1676)),  # RTX Blackwell white paper
    ("RTX 4090", _rates(165.2, 82.6, 0.0, 330.3)),  # Ada white paper
    ("RTX 3090", _rates(71, 35.6)),  # GA102 white paper
    ("V100 PCIE", _without_bfloat16(_rates(112, 14, 7))),  # V100 data sheet
    ("V100", _without_bfloat16(_rates(125, 15.7, 7.8))),  # V100 data sheet, SXM2
    ("T4", _without_bfloat16(_rates(65, 8.1))),  # T4 data sheet
    ("MI355X", _rates(2516.6, 157.3, 78.6, 5033.2)),  # MI355X data sheet
    ("MI325X", _rates(1307.4, 163.4, 163.4, 2614.9)),  # MI325X data sheet
    ("MI300X", _rates(1307.4, 163.4, 163.4, 2614.9)),  # MI300X data sheet
)

# a slice of a board, a mobile part or a cut-down edition has the big board's name and not its rate
_SMALLER = {"MIG", "LAPTOP", "MOBILE", "D", "MAX"}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of a board by its driver name and a dtype's name; None where the rate is not known."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _SMALLER:
        return None
    for needed, rates in PEAKS:
        if set(needed.split()) <= words:
            rate = rates.get(dtype)
            return None if rate is None else rate * 1e12
    return None
