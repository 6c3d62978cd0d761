"""Loop programs as Triton kernels: `emit` writes the source, `load` compiles programs of them."""
