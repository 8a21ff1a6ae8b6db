"""Sampling: from logits to tokens by logits processors, filters, and draws that are the same in every layout."""
