"""Which block is where: the block index, its eviction rule, and what LMDB keeps of it."""
