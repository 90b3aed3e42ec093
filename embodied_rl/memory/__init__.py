"""How much memory a run will take, before it starts."""
