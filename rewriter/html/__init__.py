"""The report as one self-contained page, and pictures of single sites."""
