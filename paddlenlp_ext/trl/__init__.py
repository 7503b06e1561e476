"""Trainers and arguments with TRL's names: SFT, preference training and reward models."""
