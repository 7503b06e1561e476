"""Model families, one file each; importing a file registers its family (models/registry.py)."""
