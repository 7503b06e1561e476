"""Sections of a run's configuration; for example, `optim.py` declares the keys of `config.optim`."""
