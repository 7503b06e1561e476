"""Data files to batches: read, parse, render, tokenize, truncate, cache, pack, collate. Nothing here imports Paddle.

readers               files of one format -> blocks of rows
sources               datasets -> readers; inflection is built in, hub reads data sets of the hub
row_fields            known fields of rows and messages, and their effects
row_values            checked access to the values of a row
formats, messages     row -> conversation
conversation          messages with tools, calls and thoughts
templates             conversation -> text of prompts and answers -> token ids
tokenize              rows -> tokens and loss mask, within src_length and max_length
encode                blocks -> tokens, in several processes
store, dataset        tokens of a split, mapped from the cache
mixture, stream       several datasets by weights; rows that are tokenized during training
training_rows         dataset, mixture or stream, as the configuration requests
packing               rows -> packs -> micro-batches of an epoch
sampler, stream_order micro-batches -> optimizer steps, of an epoch or of a stream
collate               micro-batch -> arrays of a batch
prompts, preview      rows for prediction; rows printed as the model sees them
types                 records shared by these modules
"""
