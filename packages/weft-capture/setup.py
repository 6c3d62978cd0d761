"""Build of the frame-evaluation hook; everything else is declared in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "weft_capture.frame._hook",
            sources=["src/weft_capture/frame/_hook.c"],
            depends=["src/weft_capture/frame/compat.h"],
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        )
    ]
)
