"""Quantities as people read them."""


def bytes_text(size: int) -> str:
    """Bytes for reading."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def seconds_text(value: float) -> str:
    """Seconds for reading, in the unit that they fill."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return "0" if value == 0 else f"{value * 1e6:.2g} µs"
