"""Run the `pnx` command: python -m paddlenlp_ext --help."""

import os
import sys

if __name__ == "__main__":
    if not __package__:
        # Paddle's launcher runs this file by its path. Python then puts the folder of the package into sys.path, where
        # its modules hide libraries with the same names, such as `peft`.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from paddlenlp_ext.commands.pnx import main

    main()
