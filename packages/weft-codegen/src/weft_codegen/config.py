"""Settings of weft_codegen, and the options of one compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any

from weft_core.arguments import AtLeast
from weft_core.errors import InvalidArgument, InvalidOption
from weft_core.settings import Settings, environment_flag


@dataclass
class CodegenSettings(Settings):
    """Process-wide settings.

    Args:
        verify_ir: check every loop program against the rules of loops/program.py (for tests).
        interpret: run programs in the reference interpreter instead of compiling them.
        keep_freed_memory: bytes of freed memory that the C library may keep for the next step
            (see kernels/malloc.py); 0 leaves the C library as it is. Read at the first compile.
        compiler_timeout: seconds after which the C compiler is ended, and the graph runs eagerly;
            None means that it is waited for.
        check_bounds: compare each load and store of generated C with how many elements its buffer
            has, and raise where one is outside (for tests; much slower); WEFT_CHECK_BOUNDS=1.
        collective_bucket: bytes up to which small collectives of a graph are sent together: gathers
            of parameters, with the option `bucket_collectives` others, too; 0 joins none.
        cache_key_tag: a text that is part of the key of what is kept on disk.
        measure: let graphs prove themselves against eager (see measure.py); the environment
            variable WEFT_MEASURE=0 turns it off for a process and what it starts.
    """

    verify_ir: bool = False
    interpret: bool = False
    keep_freed_memory: Annotated[int, AtLeast(0)] = 128 << 20
    compiler_timeout: Annotated[float, AtLeast(0.1)] | None = 60.0
    check_bounds: bool = field(default_factory=lambda: environment_flag("WEFT_CHECK_BOUNDS", False))
    collective_bucket: Annotated[int, AtLeast(0)] = 1 << 20
    cache_key_tag: str = ""
    measure: bool = field(default_factory=lambda: environment_flag("WEFT_MEASURE"))


settings = CodegenSettings()


def _option(default: bool, doc: str, name: str | None = None) -> Any:
    """An option: what it does, and its name where that is none that a field can have."""
    return field(default=default, metadata={"doc": doc, "name": name})


@dataclass(frozen=True)
class Options:
    """What one compilation may be told; names are torch.compile's, with `.` as `_`.

    Those without effect are accepted so that a program keeps its options when it switches to weft.
    """

    epilogue_fusion: bool = _option(True, "fuse pointwise work into the kernels before it")
    max_autotune: bool = _option(False, "matrix products as loops where that measures faster")
    fallback_random: bool = _option(True, "draw random numbers exactly as eager does")
    freezing: bool = _option(False, "fold parameters once; inference only, until one is written")
    shape_padding: bool = _option(True, "pad matrix products on GPUs to aligned sizes")
    triton_cudagraphs: bool = _option(False, "replay CUDA graphs (GPU)", "triton.cudagraphs")
    measure: bool = _option(True, "run eager where the first calls show a graph to be slower")
    use_graph_deduplication: bool = _option(False, "compile repeated calls of modules once")
    emulate_precision_casts: bool = _option(False, "round 16-bit results as each operator does")
    strict_numerics: bool = _option(False, "eager's bits: only exact operators become loops")
    fallback_by_default: bool = _option(False, "call each operator; only views are no calls")
    nan_asserts: bool = _option(False, "raise where a kernel makes a NaN; tells its source line")
    bucket_collectives: bool = _option(False, "join small collectives; ranks must be alike")
    trace_enabled: bool = _option(False, "write each stage to ./weft_trace", "trace.enabled")
    trace_graph_diagram: bool = _option(False, "add a diagram (SVG)", "trace.graph_diagram")

    @property
    def keeps_operators(self) -> bool:
        """Whether the operators stay eager's: none is decomposed or moved to another layout."""
        return self.strict_numerics or self.fallback_by_default

    @classmethod
    def table(cls) -> dict[str, tuple[Any, str]]:
        """Every option's name in torch.compile with its default and what it does."""
        rows = cls._fields().items()
        return {name: (item.default, item.metadata["doc"]) for name, item in rows}

    @classmethod
    def _fields(cls) -> dict[str, Field[bool]]:
        return {item.metadata["name"] or item.name: item for item in fields(cls)}

    def as_dict(self) -> dict[str, bool]:
        """Return the options that differ from their defaults, by their names in torch.compile."""
        values = {name: getattr(self, item.name) for name, item in self._fields().items()}
        defaults = {name: default for name, (default, _) in self.table().items()}
        return {name: value for name, value in values.items() if value != defaults[name]}

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Options from a dict such as `{"triton.cudagraphs": False}`.

        Raises:
            InvalidOption: for an unknown name (the error suggests the nearest one), or a value of
                the wrong type.
        """
        known = {item.name for item in fields(cls)}
        values: dict[str, bool] = {}
        for name, value in (given or {}).items():
            plain = name.replace(".", "_")
            if plain not in known:
                raise InvalidOption(name, cls.table())
            if not isinstance(value, bool):
                raise InvalidArgument(name, detail=f"{name} takes bool, not {value!r}.")
            values[plain] = value
        return cls(**values)
