"""Sections of a run's configuration: the file `optim.py` declares the keys of `config.optim`, and so on."""
