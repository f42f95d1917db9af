"""Where the operators of a run compute: shows that no operator of a model on an accelerator fell back to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .examine import Check

# These copy values and compute nothing: the host's sampler reads scores, and ids go back to the device.
MOVES = frozenset({"copy_", "_to_copy", "_local_scalar_dense", "_pin_memory", "is_pinned", "clone"})
SHOWN = 3


class OperatorCounts(TorchDispatchMode):
    """While it is entered, counts torch's floating-point operators by name: in `host` those that read CPU memory, in
    `device` all others. Views, copies, integers and scalars are not counted, nor are kernels outside torch's
    dispatcher.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: Counter[str] = Counter()
        self.device: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in MOVES:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            computed = [tensor for tensor in read if tensor.is_floating_point() and tensor.dim()]
            if computed:
                counts = self.host if any(tensor.device.type == "cpu" for tensor in computed) else self.device
                counts[name] += 1
        return func(*args, **(kwargs or {}))


def check_operators(device: str, run: Callable[[], object]) -> Check:
    """Count the operators of `run` for a model on `device`. A failure names those that ran on the host although
    `device` is another.
    """
    with OperatorCounts() as counts:
        run()
    host, there = counts.host.total(), counts.device.total()
    if device == "cpu":
        return Check(
            "operators",
            "ok",
            f"the model is on the CPU, and so are all operators: {host} of torch beside the compiled kernels",
        )
    if not host:
        return Check(
            "operators",
            "ok",
            f"no operator fell back to the CPU; {there} of torch ran on {device} beside the compiled kernels",
        )
    worst = ", ".join(f"{name} ({count} times)" for name, count in counts.host.most_common(SHOWN))
    detail = f"{host} operators of torch ran on the CPU and {there} on {device}: {worst}"
    return Check(
        "operators", "failure", detail, "report it with this line and what `onedesk doctor` says of the device"
    )
