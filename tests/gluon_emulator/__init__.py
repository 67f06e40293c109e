"""Gluon on the CPU, for the kernels of this package: its subset of `triton.experimental.gluon`, in torch.

`install` puts it in place of Gluon before a module of kernels is imported, so that the kernels' own source runs. What
it is for is the logic of a kernel, and above all its synchronisation, which it checks rather than tries:

- Each partition of `warp_specialize` is a thread, of which one runs at a time until it must wait. If all wait, that is
  a deadlock, reported with who waits where for which phase of which barrier.
- Accesses to shared memory carry vector clocks, which barriers pass on. Two of them that conflict and that nothing
  orders are an error, whichever came first here: a stage read before its copy is known to be there, or refilled before
  all are known to have read it. So is one by bulk copies or tensor cores that no fence separates from an ordinary one.
- Products are computed when they are waited for; until then their operands must not change and their sum not be read.
- Bulk copies fill what is outside of a tensor with zeros; pointers may not leave the tensor that they were made of.

Not checked: layouts and registers (compiling ahead of time does), and order among the warps of one partition.
"""

from __future__ import annotations

import sys
from types import ModuleType


GLUON = "triton.experimental.gluon"


def install() -> None:
    """Put the emulator in Gluon's place in this process. The host's descriptors stay Gluon's own."""
    import triton.experimental.gluon.language
    import triton.experimental.gluon.nvidia.hopper

    from . import hopper, language, launch

    gluon = ModuleType(GLUON)
    for name in ("jit", "constexpr_function", "aggregate"):
        setattr(gluon, name, getattr(launch, name))
    gluon.language, gluon.nvidia = language, triton.experimental.gluon.nvidia
    nvidia = ModuleType(f"{GLUON}.language.nvidia")
    language.nvidia, nvidia.hopper = nvidia, hopper
    triton.experimental.gluon = gluon
    sys.modules |= {
        GLUON: gluon,
        f"{GLUON}.language": language,
        nvidia.__name__: nvidia,
        f"{nvidia.__name__}.hopper": hopper,
    }
