"""Processes that we start."""

import os
import sys
from pathlib import Path


def python_module(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module of ours with this Python, and its environment. What lies in the current folder,
    a `wandb/` say, is not imported by it."""
    ours = str(Path(__file__).parents[2])
    places = [ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", module, *arguments], os.environ | {"PYTHONPATH": os.pathsep.join(places)}
