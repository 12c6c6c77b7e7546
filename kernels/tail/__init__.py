"""What follows an opaque experts op: latent all-reduce, norm, up-projection, shared add."""
