"""`python -m pagemill` is the `pagemill` command."""

from pagemill.cli.main import main

if __name__ == "__main__":
    main()
