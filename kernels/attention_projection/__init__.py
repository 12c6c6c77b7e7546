"""All linears that read one normalised row, before attention."""
