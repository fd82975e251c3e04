"""`python -m elastic_sim` is the `elastic-sim` command."""

from elastic_sim.cli.cli import main

if __name__ == "__main__":
    main()
