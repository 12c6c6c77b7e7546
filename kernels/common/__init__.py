"""What the fused ops share: arithmetic, collectives, policies, compositions."""
