"""Concepts read off a graph through every spelling. One file a concept; none edits the graph.

A concept is a frozen dataclass with `anchors` (the op names it starts from) and a class method
`at(view, node)` that returns an instance, None (something else), or raises Refusal with a reason
(it started to fit and then failed).
"""
