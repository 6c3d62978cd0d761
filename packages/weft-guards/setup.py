"""Builds the optional C form of checks; without a compiler the Python form is used."""

from setuptools import Extension, setup

PARTS = ("amounts", "classes", "memo", "memory", "ops", "state", "table", "tensor")

setup(
    ext_modules=[
        Extension(
            "weft_guards._native",
            ["src/weft_guards/_native.c"],
            depends=[f"src/weft_guards/_{part}.h" for part in PARTS],
            extra_compile_args=["-O2", "-std=c11"],
            optional=True,
        )
    ]
)
