"""How a checkpoint speaks of images, states and actions, and how a simulator does: conventions as
data, and the adapter between the two."""
