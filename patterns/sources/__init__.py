"""Built-in graph sources of the command line."""
