"""Glue to training frameworks: imported by who uses it, never by the library itself."""
