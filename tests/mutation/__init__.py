"""Mutation testing: single faults in the code, each of which a test should detect (docs/mutation.md)."""
