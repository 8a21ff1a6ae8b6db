"""Hugging Face checkpoints: their configurations, names, files, in and out."""
