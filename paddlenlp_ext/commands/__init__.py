"""Commands of `pnx`: one module per command or group of commands; `pnx.py` lists them."""
