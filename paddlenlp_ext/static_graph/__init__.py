"""Static graphs of language models: trace and save them, and run them with `paddle.inference`."""
