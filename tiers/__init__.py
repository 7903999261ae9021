"""Places for blocks: memory pools and the disk store behind one interface."""
