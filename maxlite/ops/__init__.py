"""Stateless numerical operations: attention, rotary positions and losses over plain arrays."""
