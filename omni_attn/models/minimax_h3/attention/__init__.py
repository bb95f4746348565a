"""Attention that MiniMax-H3 owns."""
