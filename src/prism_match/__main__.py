"""`python -m prism_match` is the `prism` command."""

from prism_match.cli import main

if __name__ == "__main__":
    main()
