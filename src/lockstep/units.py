"""Quantities as people read them."""


def bytes_text(size: int) -> str:
    """Bytes for reading."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"
