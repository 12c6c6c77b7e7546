"""The MoE router front: gate logits, latent down-projection, top-k weights and ids."""
