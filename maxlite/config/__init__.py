"""Configuration: keys, values, where they came from, and what may not be combined."""
