"""Objectives of a run: supervised fine-tuning, preference training (DPO, KTO, ...) and reward models."""
