"""Tests of the data audit."""
