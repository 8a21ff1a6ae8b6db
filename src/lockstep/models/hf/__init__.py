"""Hugging Face checkpoints: reading and writing their configurations and tensors."""
