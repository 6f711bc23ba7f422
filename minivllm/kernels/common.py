"""Common code of all Triton kernels: supported devices, and conversions that the interpreter gets
wrong."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minivllm.errors import BadInput

# TRITON_INTERPRET=1 runs kernels in numpy, on the CPU.
INTERPRETED: bool = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(INTERPRETED)


def check_device(
    option: str, device: torch.device, instead: str, below: tuple[int, int] | None = None
) -> None:
    """Check that Triton's kernels run on a device.

    Args:
        option: the knob and its value, for the message.
        instead: what to use instead.
        below: the first compute capability on which these kernels are not launched.

    Raises:
        BadInput: they cannot run there.
    """
    if device.type == "cuda":
        if torch.version.hip is not None:
            return
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise BadInput(
                f"{option} needs a GPU of compute capability 8.0 or later; use {instead}"
            )
        if below is not None and capability >= below:
            raise BadInput(
                f"{option} is not for compute capability {capability[0]}.{capability[1]}, where "
                f"Triton has compiled such kernels wrongly; use {instead}"
            )
    elif not INTERPRETED:
        raise BadInput(
            f"{option} needs a GPU, or TRITON_INTERPRET=1 in the environment, which runs its "
            f"kernels very slowly on the CPU; use {instead}"
        )


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 rounded to the nearest number of `dtype`, to even in the middle.

    The interpreter (3.6) truncates to bfloat16, so there the code below rounds."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, acc):
    """acc + a b in float32. The interpreter (3.6) multiplies the bits of bfloat16, so there the
    code widens a and b first."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh of float32, with an absolute error of about 1e-7."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
