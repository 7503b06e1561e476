"""Model families, one file per family; importing a file registers the family (models/registry.py)."""
