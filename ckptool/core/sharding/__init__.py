"""How tensors are cut: placements, meshes, and the boxes that they give."""
