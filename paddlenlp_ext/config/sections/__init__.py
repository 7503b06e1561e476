"""The sections of a run's configuration: one dataclass a file, one `option` a key."""
