"""Linear layers over weights in four and eight bits."""
