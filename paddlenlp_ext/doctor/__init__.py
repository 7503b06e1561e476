"""Self-check of an installation: `python -m paddlenlp_ext.doctor` (docs/gpu.md).

environment.py     versions, devices, flags
backends.py        backend of each op on each target, and why not a better one
op_checks/         each backend of each op against the reference on the CPU
training.py        a training step of each method and precision
generation.py      decoding with a cache
layouts.py         training on several processes, in each layout
report.py          all of it as Markdown
"""
