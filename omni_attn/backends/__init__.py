"""Attention backends: contracts, registry, and one file per provider.

Nothing is imported here, so that the registry can be read without torch.
"""
