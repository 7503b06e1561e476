"""Export language models as static graphs, and run exported models with `paddle.inference`."""
