"""Former path of ops/cpp, which documents named for `library.set_threads`."""
