"""Loop programs as Triton kernels: `emit` writes the source, `launch` compiles programs of them."""
