"""Trainers and arguments with TRL's names: SFT, preference training, reward models and GRPO."""
