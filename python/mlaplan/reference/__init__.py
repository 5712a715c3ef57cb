"""The ops in NumPy, written from the definition.

The host device runs them, and every kernel is compared with them.
"""
