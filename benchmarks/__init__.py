"""Scripts that measure; every figure in README and docs comes from one of them."""
