"""Groups of peers: the places where messages are encoded, moved, decoded and summed."""
