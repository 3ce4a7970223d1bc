"""Attention layers of public models, written with the public functions in plain PyTorch."""
