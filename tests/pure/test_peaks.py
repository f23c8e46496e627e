"""Peak rates: the right board's row, and none where the rate is not known."""

from __future__ import annotations

import pytest

from isotron.core.peaks import peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla V100-PCIE-16GB", "float16", 112),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.4),
        ("NVIDIA H200", "float8", 1978.9),
        ("NVIDIA B200", "float4", 9000),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA L40S", "bfloat16", 362.1),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", "float16", 364.2),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
    ],
)
def test_known_boards(name, dtype, tera):
    assert peak_flops(name, dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bfloat16"),
        ("Some Board 9000", "bfloat16"),
        ("x86_64", "float32"),
        ("Tesla V100-SXM2-32GB", "bfloat16"),
        ("NVIDIA A100-SXM4-80GB", "float8"),
        ("NVIDIA H100 80GB HBM3", "float4"),
    ],
)
def test_unknown_rates_are_none(name, dtype):
    assert peak_flops(name, dtype) is None
