"""Loop programs as Triton kernels: `emit` writes the source, `launch` runs and compiles it."""
