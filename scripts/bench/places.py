"""Where a script leaves its figures."""

from pathlib import Path


def place(given: Path | None, usual: str, without_card: bool) -> Path:
    """`given`, or `usual`. What a smoke run finds, or any without a card, lies below build/ then: docs/ holds figures
    of a card, and what lies there counts as measured."""
    return given or (Path("build") / usual if without_card else Path(usual))
