"""Objectives of a run: supervised fine-tuning, distillation, preference training (DPO, KTO, ...) and reward models."""
