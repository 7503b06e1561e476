"""Trainers and their arguments under TRL's names: SFT, preferences, reward models."""
