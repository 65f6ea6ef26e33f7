"""``python -m gradplan``."""

from gradplan.cli import main

if __name__ == "__main__":
    main(prog_name="gradplan")
