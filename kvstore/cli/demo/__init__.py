"""`kvstore demo`: a real engine loads from kvstore what it had computed before."""
