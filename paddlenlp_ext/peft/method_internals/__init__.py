"""Internal modules of large methods; the name of a module starts with the name of the method."""
