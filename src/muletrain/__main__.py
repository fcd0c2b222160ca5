"""``python -m muletrain`` is the program ``muletrain``."""

from muletrain.cli.main import main

if __name__ == "__main__":
    main()
