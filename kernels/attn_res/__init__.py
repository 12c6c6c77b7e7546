"""AttnRes where it stands alone: score, mix and norm of the residual sources."""
