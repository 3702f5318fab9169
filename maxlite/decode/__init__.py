"""Decoding: sampling, the key-value cache loop, and the decode command."""
