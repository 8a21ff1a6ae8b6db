"""The contestants of `benchmarks.grpo_step`, each of which runs in a process of its own."""
