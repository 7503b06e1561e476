"""Data files to batches: read, parse, render, tokenize, truncate, cache, pack, collate. Nothing here imports Paddle.

readers         files, hub data sets and built-in data -> rows; `dataset_files` finds the files of a split
rows            formats and fields of rows, their errors, and row -> conversation
templates       conversation -> text of prompts and answers -> token ids and loss mask
tokenization    rows -> tokens within src_length and max_length, in several processes; token cache and its key
dataset         tokens of a split, mapped from the cache
mixture         several datasets by weights
streaming       rows that are read and tokenized during training, in shuffled windows
training_rows   dataset, mixture or stream, as the configuration requests
packing         rows -> packs -> micro-batches of an epoch
sampler         micro-batches -> optimizer steps (`step_batch`)
collate         micro-batch -> arrays of a batch; `pose` skips positions
preference      pairs of answers for DPO and reward models
audit           checks of the data before training
preview         rows printed as the model sees them
prediction_prompts  rows for prediction
"""
