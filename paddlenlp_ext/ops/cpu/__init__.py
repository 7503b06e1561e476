"""Former path of `ops.cpp`, kept because the documentation named `ops.cpu.library.set_threads`."""
