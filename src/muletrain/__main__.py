"""``python -m muletrain`` is the program ``muletrain``."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # -m puts the working folder first, where a random.py would replace the standard library's
    from muletrain.cli.main import main

    main()
