"""The device module against faked devices: what each generation may do, and what the refusals say."""

from __future__ import annotations

import pytest
import torch

from isotron.core import device as dev
from isotron.core.errors import Refused


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that torch sees GPUs: `gpus(count, capability, name)`."""

    def fake(count, capability=(9, 0), name="NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)

    return fake


@pytest.mark.parametrize(
    ("capability", "generation", "bf16", "flash", "fp8", "fp4"),
    [
        ((6, 1), "Pascal or older", "refused", False, "emulated", "emulated"),
        ((7, 0), "Volta", "refused", False, "emulated", "emulated"),
        ((7, 5), "Turing", "refused", False, "emulated", "emulated"),
        ((8, 0), "Ampere", "native", True, "emulated", "emulated"),
        ((8, 6), "Ampere", "native", True, "emulated", "emulated"),
        ((8, 9), "Ada", "native", True, "native", "emulated"),
        ((9, 0), "Hopper", "native", True, "native", "emulated"),
        ((10, 0), "Blackwell", "native", True, "native", "native"),
        ((12, 0), "Blackwell", "native", True, "native", "native"),
    ],
)
def test_generations(gpus, capability, generation, bf16, flash, fp8, fp4):
    gpus(1, capability)
    able = dev.capabilities(dev.resolve("cuda"))
    assert (able.generation, able.flash) == (generation, flash)
    assert [dev.support(able, d) for d in ("bfloat16", "float8", "float4")] == [bf16, fp8, fp4]
    assert dev.support(able, "float16") == dev.support(able, "float32") == dev.support(able, "float64") == "native"


def test_bfloat16_on_turing_names_what_works(gpus):
    gpus(1, (7, 5))
    problem = dev.check(dev.resolve("cuda"), "bfloat16")
    assert problem is not None
    assert "--dtype bfloat16" in problem.asked and "Turing" in problem.case and "--dtype float16" in problem.fix
    assert dev.check(dev.TURING, "float16") is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "float8", "float4"])
def test_the_cpu_does_everything(dtype):
    assert dev.check(torch.device("cpu"), dtype) is None


def test_unknown_dtype():
    assert dev.check(dev.CPU, "float7").fix == "--dtype float32"
    with pytest.raises(Refused, match="float7"):
        dev.dtype_of("float7")
    assert dev.dtype_of("bfloat16") is torch.bfloat16


def test_auto(gpus):
    gpus(0)
    assert dev.resolve("auto") == torch.device("cpu") and dev.count() == 1
    gpus(4)
    assert dev.resolve("auto", local_rank=3) == torch.device("cuda", 3) and dev.count() == 4
    assert dev.resolve("cpu") == torch.device("cpu") and dev.count("cpu") == 1


def test_cuda_without_one(gpus):
    gpus(0)
    with pytest.raises(Refused, match="--device cuda") as caught:
        dev.resolve("cuda")
    assert "--device cpu" in caught.value.problems[0].fix


def test_more_processes_than_gpus(gpus):
    gpus(2)
    with pytest.raises(Refused, match="local rank 2") as caught:
        dev.resolve("auto", local_rank=2)
    assert "at most 2" in caught.value.problems[0].fix


def test_unknown_device():
    with pytest.raises(Refused, match="auto, cpu and cuda"):
        dev.resolve("tpu")


def test_back_ends():
    assert dev.backend(torch.device("cpu")) == "gloo" and dev.backend(torch.device("cuda", 0)) == "nccl"


def test_cpu_statistics():
    cpu = torch.device("cpu")
    dev.synchronize(cpu)
    dev.activate(cpu)
    dev.reset_peak_memory(cpu)
    assert 10e6 < dev.peak_memory(cpu) < dev.total_memory(cpu)
    assert not dev.is_cuda(cpu) and dev.device_name(cpu)
