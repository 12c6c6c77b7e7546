"""Captures vLLM 0.33's own Kimi K3 decoder layers as graph files, on a machine without a GPU.

A developer command, `python -m k3fuse.patterns.sources.vllm_k3`; nothing imports it by itself.
"""
