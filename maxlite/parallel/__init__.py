"""Meshes of devices, and which axis of a tensor lies along which of them."""
