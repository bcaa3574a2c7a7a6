"""Communication between ranks: collectives, process groups, device meshes, pipeline links."""
