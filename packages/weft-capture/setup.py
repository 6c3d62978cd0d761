"""Build of the frame-evaluation hook; everything else is declared in pyproject.toml."""

import sysconfig
from pathlib import Path

from setuptools import Extension, setup

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "weft does not run on free-threaded builds of CPython yet: use the standard build"
    )

setup(
    ext_modules=[
        Extension(
            "weft_capture.frame._hook",
            sources=["src/weft_capture/frame/_hook.c"],
            depends=list(map(str, Path("src/weft_capture/frame").glob("*.h"))),
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        )
    ]
)
