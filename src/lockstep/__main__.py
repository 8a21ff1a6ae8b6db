"""``python -m lockstep``, where the command is not on ``PATH``."""

from lockstep.main.cli import main

if __name__ == "__main__":
    main()
