"""o-proj, all-reduce over the group, then AttnRes or add + RMSNorm."""
