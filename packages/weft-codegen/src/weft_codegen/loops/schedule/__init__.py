"""Loop nodes to kernels: what is fused, in which loop order (see fuse.py)."""
