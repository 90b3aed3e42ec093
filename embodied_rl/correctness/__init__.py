"""The promises of embodied_rl.contracts as checks that run on any policy or simulator."""
