"""The `embodied-rl` command. Everything heavy is imported by the command that needs it."""

from embodied_rl.cli.main import main

__all__ = ["main"]
