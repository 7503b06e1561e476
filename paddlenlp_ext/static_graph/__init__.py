"""Static graphs of language models: tracing and saving, and running them with `paddle.inference`."""
