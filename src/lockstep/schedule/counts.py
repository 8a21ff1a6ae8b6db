"""How far a scheduler is."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The progress of a scheduler, answers that were taken from it included.

    Args:
        finished: The number of finished sequences.
        tokens: The number of tokens sampled by each replica, those of unfinished sequences included.
        pages: The number of pages in use, over all replicas.
        max_pages: The number of pages that can be used, over all replicas.
        steps: The number of steps that sampled those tokens, counted once for each sequence; fewer than tokens where
            drafts were verified.
        drafted: The number of tokens for which there was a draft.
        right: The number of those that were as drafted.
    """

    finished: int
    tokens: tuple[int, ...]
    pages: int
    max_pages: int
    steps: int = 0
    drafted: int = 0
    right: int = 0
