"""Rows for what else is known by name: NumPy, Triton, torch.distributed, optimizers."""
