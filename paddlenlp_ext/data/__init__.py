"""Rows to batches: read, understood, rendered, tokenized, cut, cached, packed. Nothing here imports Paddle.

sources, inflection -> formats -> template -> encode (truncate) -> cache -> dataset -> packing -> batch
"""
