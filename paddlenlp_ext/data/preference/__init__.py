"""Preference data for DPO, KTO and reward models: parsing, tokenization and batches."""
