"""Samples inside Tunix's trainers: one line beside the trainer (docs/tunix.md)."""

from lockstep.tunix.hooks import SampleHooks, sample_hooks

__all__ = ["SampleHooks", "sample_hooks"]
