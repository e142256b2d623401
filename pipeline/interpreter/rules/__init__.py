"""The rewrites of fusion.py, by what they recognise."""
