"""Parse the declarations of the C++ library's entry points and structs in `csrc/api*.h`."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

HEADERS = sorted((Path(__file__).parents[1] / "csrc").glob("api*.h"))
_SCALARS = {"i64": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double, "bool": ctypes.c_bool}


@functools.cache
def parameter_types() -> dict[str, list[type]]:
    """Return the ctypes parameter types of each entry point, by name."""
    found = re.findall(r"Status (\w+)\((.*?)\);", _declarations(), flags=re.DOTALL)
    return {name: [kind for _, kind in _split(parameters, ",")] for name, parameters in found}


@functools.cache
def struct(name: str) -> type[ctypes.Structure]:
    """Return a ctypes class with the fields of a struct of csrc/api*.h; pointer fields are `c_void_p`."""
    found = re.search(rf"struct {name} {{(.*?)}};", _declarations(), flags=re.DOTALL)
    assert found is not None, f"csrc/api*.h do not declare a struct {name}"
    return type(name, (ctypes.Structure,), {"_fields_": _split(found[1], ";")})


@functools.cache
def _declarations() -> str:
    return re.sub(r"//.*", "", "".join(header.read_text(encoding="utf-8") for header in HEADERS))


def _split(declarations: str, separator: str) -> list[tuple[str, type]]:
    """Return the name and the ctypes type of each declaration, such as ("x", c_void_p) for "const float* x"."""
    pairs = (each.strip().rsplit(maxsplit=1) for each in declarations.split(separator) if each.strip())
    return [(name, ctypes.c_void_p if kind.endswith("*") else _SCALARS[kind]) for kind, name in pairs]
