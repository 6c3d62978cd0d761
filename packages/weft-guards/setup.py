"""Builds the optional C form of checks; without a compiler the Python form is used."""

from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "weft_guards._native",
            ["src/weft_guards/_native.c"],
            depends=list(map(str, Path("src/weft_guards").glob("*.h"))),
            extra_compile_args=["-O2", "-std=c11"],
            optional=True,
        )
    ]
)
