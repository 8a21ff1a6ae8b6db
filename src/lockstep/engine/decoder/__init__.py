"""The programs that the engine launches, made of one transformer over a paged cache."""
