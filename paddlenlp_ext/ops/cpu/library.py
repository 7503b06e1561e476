"""Thread count of the C++ library, under its former documented path; use `ops.cpp.library`."""

from paddlenlp_ext.ops.cpp.library import set_threads, threads

__all__ = ["set_threads", "threads"]
