"""Builds what opens generated libraries: the entry from Python (C), and cffi's form of weft.h."""

import re
from pathlib import Path

from cffi import FFI
from setuptools import Extension, setup

KERNELS = "src/weft_codegen/kernels"
HEADER = f"{KERNELS}/include/weft.h"

ffi = FFI()
ffi.set_source("weft_codegen.kernels._abi", None)
ffi.cdef(re.sub(r"^#.*$", "", Path(HEADER).read_text(), flags=re.MULTILINE))
ffi.emit_python_code(f"{KERNELS}/_abi.py")

setup(
    ext_modules=[
        Extension(
            "weft_codegen.kernels._entry",
            sources=[f"{KERNELS}/_entry.c"],
            depends=[HEADER, f"{KERNELS}/_gpu_kernel.h"],
            extra_compile_args=[
                *("-O2", "-std=gnu11", "-fno-strict-aliasing"),
                *("-Wall", "-Wextra", "-Wno-unused-parameter"),
            ],
        )
    ]
)
