"""What crosses the line between host and cell, and the words both sides use for it.

Imports nothing of the package but its errors, so that either side can import all of it.
"""
