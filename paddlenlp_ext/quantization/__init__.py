"""Base weights in few bits: how they are made, and the linear that computes with them."""
