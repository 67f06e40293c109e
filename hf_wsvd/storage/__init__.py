"""Packed storage of keys and values: one contract, one file a scheme."""
