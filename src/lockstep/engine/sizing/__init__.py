"""How much fits, in which layout, and how fast it would be: chosen from agreed numbers before anything is compiled."""
