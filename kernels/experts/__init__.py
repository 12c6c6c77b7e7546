"""Routed experts with the shared expert beside them, all-reduce, norm and up-projection."""
