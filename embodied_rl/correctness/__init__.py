"""The promises of contracts.py as checks that run on any policy or simulator."""
