from typing import Any

class dtype:
    @property
    def name(self) -> str: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

bool: dtype
uint8: dtype
uint16: dtype
uint32: dtype
uint64: dtype
int8: dtype
int16: dtype
int32: dtype
int64: dtype
float16: dtype
half: dtype
bfloat16: dtype
float32: dtype
float: dtype
float64: dtype
double: dtype
float8_e4m3fn: dtype
float8_e5m2: dtype
complex64: dtype
cfloat: dtype
complex128: dtype
cdouble: dtype
pstring: dtype
raw: dtype

def finfo(dtype: dtype | str) -> Any: ...
def iinfo(dtype: dtype | str) -> Any: ...
