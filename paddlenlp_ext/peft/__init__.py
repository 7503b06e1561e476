"""Adapters. A method is one file here: a config, a layer and, where it needs one, a model class."""
