"""`python -m swa_inductor`: the command line."""

from swa_inductor.cli import main

if __name__ == "__main__":
    main()
