"""Components of methods that are too large for one file; each belongs to the method in its name."""
