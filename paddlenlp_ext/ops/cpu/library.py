"""Thread count of the C++ library, under the path that was documented before ops/cpp."""

from paddlenlp_ext.ops.cpp.library import set_threads, threads

__all__ = ["set_threads", "threads"]
