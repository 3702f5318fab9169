"""Layers.

One legend for shapes, the same letters in einsum strings and in docstrings: B batch, T query length, S key
length, D emb_dim, N query heads, K key/value heads, G = N/K, H head_dim, F mlp_dim, V vocab_size, L layers.
"""
