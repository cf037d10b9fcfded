"""Peers of our ops: what torch.compile makes of plain torch, and packages that may not be there."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPILED = ("compiled", "compiled, tuned")


@dataclass(frozen=True)
class Peer:
    """An implementation of an op, or why there is none."""

    function: Callable[..., Any] | None = None
    absent: str = ""


def imported(module: str, adapt: Callable[[Any], Callable[..., Any]]) -> Peer:
    """`adapt` of the module, where that can be imported."""
    try:
        return Peer(adapt(importlib.import_module(module)))
    except Exception as error:  # a package may fail in any way on a machine that it was not made for
        return Peer(absent=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else module}")


def compiled_peers(function: Callable[..., Any]) -> dict[str, Peer]:
    """torch.compile of `function` as it is by default and as it tunes itself, for this shape alone.

    What was compiled before is forgotten, so that no shape meets the limit of recompilations.
    """
    try:
        import torch
        import torch._dynamo
        import torch._functorch.config as functorch
        import torch._inductor as inductor

        torch._dynamo.reset()
        functorch.donated_buffer = False  # a backward that is timed by itself runs more than once on one forward
        options = dict(inductor.list_mode_options("max-autotune-no-cudagraphs")) | {"emulate_precision_casts": True}
        default = torch.compile(function, dynamic=False)
        tuned = torch.compile(function, dynamic=False, options=options)
    except Exception as error:  # its insides change from version to version
        return {name: Peer(absent=f"{type(error).__name__}: {error}") for name in COMPILED}
    return {COMPILED[0]: Peer(default), COMPILED[1]: Peer(tuned)}
