"""Weights into L2 before the kernel that reads them: an optional launch, off by default."""
