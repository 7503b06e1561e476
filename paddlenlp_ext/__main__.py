"""Run the `pnx` command: python -m paddlenlp_ext --help."""

import os
import sys

if __name__ == "__main__":
    if not __package__:
        # Paddle's launcher runs this file by its path. Python then adds the folder paddlenlp_ext to sys.path, and
        # subpackages such as `peft` hide installed libraries of the same name.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from paddlenlp_ext.commands.pnx import main

    main()
