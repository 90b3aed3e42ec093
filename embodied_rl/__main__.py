"""`python -m embodied_rl` is the `embodied-rl` command."""

from embodied_rl.cli import main

if __name__ == "__main__":
    main()
