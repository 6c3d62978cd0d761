"""weft_codegen: compiles an aten graph to one fused program (see compile.py)."""
