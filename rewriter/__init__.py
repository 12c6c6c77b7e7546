"""The rewriting engine: recognise, match, guard, edit, verify, report.

It knows no pattern and no kernel by name; both are found through entry points.
Importing it needs torch and sympy only.
"""
