"""The loop over steps, and what is called between two of them."""
