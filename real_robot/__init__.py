"""Running a trained policy on a robot."""
