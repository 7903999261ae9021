"""`kvstore bench`: the data path beside what the machine can do without kvstore."""
