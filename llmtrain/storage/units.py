"""Large numbers, and lengths of time, as people read them."""


def plural(count: int, noun: str) -> str:
    """`count` of `noun`, for a line that a person reads."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def in_bytes(n: float) -> str:
    """1.23 GB; below a kilobyte to the byte."""
    return f"{n:,} bytes" if n < 1000 else scaled(n, "B", "kB", "MB", "GB", "TB")


def in_flops(n: float) -> str:
    """8.34 TFLOPs."""
    return scaled(n, *(f"{prefix}FLOPs" for prefix in ("", "k", "M", "G", "T", "P", "E", "Z")))


def scaled(n: float, *units: str) -> str:
    """With two decimals in the first of `units`, each 1000 times the one before, that leaves less than 1000."""
    for unit in units[:-1]:
        if round(n, 2) < 1000:
            return f"{n:,.2f} {unit}"
        n /= 1000
    return f"{n:,.2f} {units[-1]}"


def duration(seconds: float) -> str:
    """A length of time for people: 45s, 12m30s, 3h05m, 2d04h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
