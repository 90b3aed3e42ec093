"""Running episodes: planners, worker processes, the collector."""
