"""Model families, each in one file: configuration, switches, Hugging Face's names of tensors, presets."""
