"""CPU or CUDA: which device, which back end, which number types, and what it can do. The only place that asks.

What a device cannot do is refused with an error that names what works, or emulated: `support` says which.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from isotron.core.errors import Problem, refuse
from isotron.core.peaks import peak_flops

__all__ = [
    "Capabilities",
    "activate",
    "backend",
    "build",
    "capabilities",
    "check",
    "count",
    "copy_to_host",
    "device_name",
    "flash_package",
    "dtype_of",
    "has_flex",
    "has_grouped_host_flash",
    "has_grouped_matmul",
    "has_packed_products",
    "has_wide_instructions_unused",
    "host_buffer",
    "host_bytes",
    "host_zeros",
    "is_cuda",
    "peak_flops",
    "peak_memory",
    "reset_peak_memory",
    "resolve",
    "start_copies",
    "support",
    "synchronize",
    "total_memory",
]

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


# ---- what a device can do ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capabilities:
    """What a generation of devices does in hardware: `native` number types, flash attention, TF32 matmul."""

    generation: str
    native: frozenset[str]
    flash: bool = False
    tf32: bool = False


_BASE = ("float64", "float32", "float16")

CPU = Capabilities("CPU", frozenset({*_BASE, "bfloat16"}), flash=True)
PASCAL = Capabilities("Pascal or older", frozenset(_BASE))
VOLTA = Capabilities("Volta", frozenset(_BASE))
TURING = Capabilities("Turing", frozenset(_BASE))
AMPERE = Capabilities("Ampere", frozenset({*_BASE, "bfloat16"}), flash=True, tf32=True)
ADA = Capabilities("Ada", AMPERE.native | {"float8"}, flash=True, tf32=True)
HOPPER = Capabilities("Hopper", AMPERE.native | {"float8"}, flash=True, tf32=True)
BLACKWELL = Capabilities("Blackwell", AMPERE.native | {"float8", "float4"}, flash=True, tf32=True)
ROCM = Capabilities("ROCm", frozenset({*_BASE, "bfloat16"}), flash=True)

# from this compute capability on
GENERATIONS: tuple[tuple[tuple[int, int], Capabilities], ...] = (
    ((10, 0), BLACKWELL),
    ((9, 0), HOPPER),
    ((8, 9), ADA),
    ((8, 0), AMPERE),
    ((7, 5), TURING),
    ((7, 0), VOLTA),
    ((0, 0), PASCAL),
)

EMULATED = frozenset({"float8", "float4"})  # rounded exactly in software: same numbers, no speed


def of_compute_capability(version: tuple[int, int]) -> Capabilities:
    """The row of the table that a compute capability such as (8, 6) falls into."""
    return next(row for first, row in GENERATIONS if version >= first)


def capabilities(device: torch.device) -> Capabilities:
    """What this device can do."""
    if device.type == "cpu":
        return CPU
    if torch.version.hip is not None:
        return ROCM
    return of_compute_capability(torch.cuda.get_device_capability(device))


def support(able: Capabilities, dtype: str) -> str:
    """`native`, `emulated` or `refused`."""
    if dtype in able.native:
        return "native"
    return "emulated" if dtype in EMULATED else "refused"


def check(device: torch.device | Capabilities, dtype: str) -> Problem | None:
    """The problem with training in `dtype` on this device, or None; what is emulated is no problem."""
    able = device if isinstance(device, Capabilities) else capabilities(device)
    if support(able, dtype) != "refused":
        return None
    if dtype != "bfloat16":
        return Problem(f"--dtype {dtype}", f"this is none of {', '.join(DTYPES)}", "--dtype float32")
    return Problem(
        f"--dtype bfloat16 on a {able.generation} GPU",
        f"{able.generation} has no bfloat16 arithmetic; Ampere was the first with it",
        "--dtype float16 (with dynamic loss scaling), or --dtype float32",
    )


# ---- which device --------------------------------------------------------------------------------------------------


def count(name: str = "auto") -> int:
    """Processes that a machine takes at one per device: its GPUs; 1 for the CPU."""
    return torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 1


def resolve(name: str, local_rank: int = 0) -> torch.device:
    """The device of a process: `auto` is CUDA where there is one, else the CPU; one GPU per local rank."""
    if name not in ("auto", "cpu", "cuda"):
        raise refuse(f"--device {name}", "the devices are auto, cpu and cuda", "--device auto")
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise refuse("--device cuda", _why_no_cuda(), "--device cpu, or --device auto to take what there is")
    devices = torch.cuda.device_count()
    if local_rank >= devices:
        raise refuse(
            f"--device cuda for local rank {local_rank}",
            f"this machine shows {devices} GPU(s), and each process needs one of its own",
            f"at most {devices} process(es) on this machine (a smaller --tp, --pp or --dp), or --device cpu",
        )
    return torch.device("cuda", local_rank)


def _why_no_cuda() -> str:
    if build() == "CPU":
        return f"torch {torch.__version__} is a build without GPU support"
    return f"torch {torch.__version__} finds no GPU (driver missing, or CUDA_VISIBLE_DEVICES is empty)"


def activate(device: torch.device) -> None:
    """Makes this the device of everything that names none; before the first collective."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def is_cuda(device: torch.device) -> bool:
    """Whether work is queued on the device, so that clocks must wait for it."""
    return device.type == "cuda"


def backend(device: torch.device) -> str:
    """The back end of collectives: `nccl` between GPUs, `gloo` between CPU processes."""
    return "nccl" if device.type == "cuda" else "gloo"


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of an option's value; refuses names that are not types to train in."""
    if name not in DTYPES:
        raise refuse(f"--dtype {name}", f"the dtypes are {', '.join(DTYPES)}", "--dtype float32")
    return DTYPES[name]


# ---- what it does now ----------------------------------------------------------------------------------------------


def build() -> str:
    """What torch was built for: `CPU`, or CUDA or ROCm with its version."""
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip is not None else "CPU"


def device_name(device: torch.device) -> str:
    """The name that the driver gives the device; for the CPU the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() or "cpu"


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what was asked of it, so that a clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_buffer(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes of host memory, touched once; memory that the device can copy into by itself where it is a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").zero_()


def host_bytes(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes of host memory without values; memory that the device can copy from and into by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in host memory; memory that the device can copy from and into by itself where it is a GPU."""
    return torch.zeros(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy on `device`; the host does not wait for a copy to CUDA, which is read from pinned memory."""
    target = torch.device(device)
    if is_cuda(target) and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # kept until the copy is done, by torch
    return tensor.to(target, non_blocking=True)


def start_copies(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Callable[[], None]:
    """Begin to copy (target, source) to or from the host, behind what is queued on the device; the result waits."""
    if device.type != "cuda":
        for target, source in pairs:
            target.copy_(source)
        return lambda: None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        done: torch.cuda.Event = stream.record_event()
    return done.synchronize


def copy_to_host(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (place in a host buffer, tensor on a GPU) beside the work that is queued; returns when all are there.

    The tensors must hold their values already: the caller has synchronised.
    """
    if not pairs:
        return
    stream = torch.cuda.Stream(pairs[0][1].device)
    with torch.cuda.stream(stream):
        for place, tensor in pairs:
            place.copy_(tensor.detach(), non_blocking=True)
    stream.synchronize()


def peak_memory(device: torch.device) -> int:
    """Most bytes held: allocated tensors since the last reset on a GPU, the process's resident peak on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # POSIX only, so that this module loads anywhere

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def reset_peak_memory(device: torch.device) -> None:
    """Starts the peak anew on a GPU; the CPU's is the process's and cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def total_memory(device: torch.device) -> int | None:
    """Bytes of the device, or of the machine for the CPU; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


@lru_cache(maxsize=1)
def has_grouped_host_flash() -> bool:
    """Whether the CPU's flash kernel takes fewer heads of keys than of queries. That of torch 2.6 does not look: it
    reads on behind the keys, and its backward writes there. So it is asked about keys behind which others lie.
    """
    q, k = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1, 1)
    v = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    try:
        o, _ = call(q, k[:, :1], v[:, :1], 0.0, False)
    except RuntimeError:
        return False
    return bool((o == 1.0).all())


def has_wide_products(device: torch.device) -> bool:
    """Whether a product of 16-bit matrices can be had in float32, as it is summed, instead of rounded to 16 bits."""
    return device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype")


def has_wide_instructions_unused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether MKL leaves this processor's AVX-512 alone, which oneDNN takes for float32 products."""
    return device.type == "cpu" and dtype is torch.float32 and _is_wide_host_of_others()


@lru_cache(maxsize=1)
def _is_wide_host_of_others() -> bool:
    named = getattr(torch.ops.mkldnn, "_linear_pointwise", None) is not None and torch.backends.mkldnn.is_available()
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return named and wide and torch.backends.mkl.is_available() and _host_vendor() not in ("", "GenuineIntel")


def _host_vendor() -> str:
    """The processor's maker in its own word, empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def has_packed_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of few rows takes a matrix in an order of its own, and is faster with it."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not all(hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and ops._is_mkldnn_bf16_supported())


def has_grouped_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one call multiplies the rows of many experts, and faster than one product each."""
    return device.type == "cuda" and dtype is torch.bfloat16 and hasattr(torch, "_grouped_mm")


FLASH_PACKAGE = (2, 7)  # the first version with these calls


@lru_cache(maxsize=1)
def _flash_module() -> ModuleType | None:
    """The calls of the flash-attn package, None where it is not installed or too old."""
    if find_spec("flash_attn") is None:
        return None
    try:
        found = tuple(int(part) for part in version("flash-attn").split(".")[:2])
    except PackageNotFoundError:
        return None
    return import_module("flash_attn.flash_attn_interface") if found >= FLASH_PACKAGE else None


def flash_package(device: torch.device) -> ModuleType | None:
    """The flash-attn package for this device, where there is one."""
    return _flash_module() if is_cuda(device) and torch.version.hip is None else None


def has_flex(device: torch.device) -> bool:
    """Whether FlexAttention compiles here with a backward, and its torch gives the log-sum-exp as asked for."""
    if not is_cuda(device) or find_spec("triton") is None:
        return False
    return hasattr(import_module("torch.nn.attention.flex_attention"), "AuxRequest")
