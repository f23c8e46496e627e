"""Which kernel computes attention: what is asked for, what the device has, and what the mask and the scores need.

| backend | takes                                                                                        |
|---------|----------------------------------------------------------------------------------------------|
| auto    | flash where nothing hinders it, else explicit probabilities                                  |
| flash   | the flash-attn package where it is installed, torch's flash kernel elsewhere                 |
| fused   | any fused kernel: flash, or on a GPU FlexAttention, which bounds scores and takes any type   |
| unfused | explicit probabilities                                                                       |

On the CPU flash is torch's kernel for it. A kernel that cannot do what the model asks for is refused, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isotron.core import device as devices
from isotron.core.errors import Refused, refuse
from isotron.core.nn.flash import LARGEST_HEAD, Flash, PackageCalls, TorchCalls
from isotron.core.nn.kernels import HostFlash, Kernel

FUSED = ("flash", "fused")


@dataclass(frozen=True)
class Flexible:
    """FlexAttention, which takes whole rows and gives no tiles."""

    scale: float
    softcap: float = 0.0


@dataclass(frozen=True)
class Wanted:
    """What attention needs of a kernel. `drops`: probabilities are dropped by place."""

    backend: str
    dtype: torch.dtype
    device: torch.device
    head_size: int
    scale: float
    softcap: float = 0.0
    drops: bool = False


def fused(want: Wanted) -> Kernel | Flexible | None:
    """The fused kernel for this, None for explicit probabilities; refused where one is insisted upon in vain."""
    if want.backend == "unfused" or want.drops:
        if want.backend in FUSED:
            raise _refused(want)
        return None
    found: Kernel | Flexible | None = _flash(want)
    if found is None and want.backend == "fused" and devices.has_flex(want.device):
        found = Flexible(want.scale, want.softcap)
    if found is None and want.backend in FUSED:
        raise _refused(want)
    return found


def _flash(want: Wanted) -> Kernel | None:
    """The flash kernel that this device has for these tensors, if any."""
    if not devices.is_cuda(want.device):
        return None if want.softcap else HostFlash(want.scale)
    narrow = want.dtype in (torch.bfloat16, torch.float16) and want.head_size <= LARGEST_HEAD
    if not narrow or not devices.capabilities(want.device).flash:
        return None
    api = devices.flash_package(want.device)
    if api is not None:
        return Flash(want.scale, PackageCalls(api), want.softcap)
    return None if want.softcap else Flash(want.scale, TorchCalls())


def _refused(want: Wanted) -> Refused:
    asked = f"--attention-backend {want.backend}"
    if want.drops:
        case = "its kernels cannot drop attention probabilities by place"
        return refuse(asked, case, "--attention-dropout 0.0, or unfused")
    if want.softcap:
        case = f"its kernels here have no bound on scores, and this model has {want.softcap:g}"
        return refuse(asked, case, "--attention-backend auto")
    case = f"this device has no such kernel with the log-sum-exp for {want.dtype} and heads of {want.head_size}"
    return refuse(asked, case, "--attention-backend auto")


def described(want: Wanted) -> str:
    """The kernel by name, for a log."""
    kernel = fused(want)
    if kernel is None:
        return "explicit probabilities"
    if isinstance(kernel, Flexible):
        return "FlexAttention"
    name = kernel.calls.name if isinstance(kernel, Flash) else "torch's flash kernel"
    return f"{name} on {want.device.type}"
