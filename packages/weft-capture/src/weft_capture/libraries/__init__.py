"""Rules for libraries that capture knows by name: NumPy, Triton, torch.distributed, optimizers."""
