"""Immutable versions of the state: as tensors, as directories, and back."""
