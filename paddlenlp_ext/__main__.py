"""Run the `pnx` command: python -m paddlenlp_ext --help."""

from paddlenlp_ext.commands.pnx import main

if __name__ == "__main__":
    main()
