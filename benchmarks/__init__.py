"""Benchmarks: scripts that measure ours, its peers and the memory floor side by side in one run."""
