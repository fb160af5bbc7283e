"""`python -m discern`, which `torchrun -m discern` needs too."""

from discern.cli.main import main

if __name__ == "__main__":
    main()
