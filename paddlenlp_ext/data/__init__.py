"""Data pipeline, from data files to batches. The package does not import Paddle.

readers             read rows from files, hub datasets and built-in datasets; `dataset_files` finds the files
rows                parse rows of every known format into conversations
templates           render conversations with a chat template; compute token ids and loss masks
tokenization        tokenize and truncate rows in several processes; cache the tokens on disk
dataset             tokenized split, memory-mapped from the cache
mixture             several datasets, interleaved by weight
streaming           rows that are read, tokenized and shuffled in windows during training
training_rows       choose a dataset, a mixture or a stream from the configuration
packing             pack the rows of an epoch, and group the packs into micro-batches
sampler             group micro-batches into optimizer steps (`step_batch`)
assign_to_ranks     assign the micro-batches of a step to ranks
collate             collate a micro-batch into arrays; `pose` skips position ids
preference          pairs of answers for DPO and reward models
audit               checks of the data before training
preview             print rows with their target tokens highlighted
prediction_prompts  read rows for prediction
"""
