"""Former path of `ops.cpp`, kept because earlier documentation named `ops.cpu.library.set_threads`."""
