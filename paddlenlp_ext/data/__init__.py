"""Data files to batches: read, parse, render, tokenize, truncate, cache, pack, collate. Nothing here imports Paddle.

sources, inflection   rows of a data file, or of the built-in dataset
row_fields            known fields of rows and messages, and their effects
formats               row -> conversation
templates             conversation -> text of prompts and answers -> token ids
tokenize              rows -> tokens and loss mask, within src_length and max_length
dataset               tokens of a split, mapped from the cache
packing               rows -> packs -> micro-batches of an epoch
sampler               micro-batches -> optimizer steps
collate               micro-batch -> arrays of a batch
prompts, preview      rows for prediction; rows printed as the model sees them
types                 records shared by these modules
"""
