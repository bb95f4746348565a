"""Kernels over a paged KV cache: writing, gathering, attention; in torch anywhere, in Triton on GPUs.

Legend of the files here: R requests, T query tokens of all requests, W pages that a request may have, N pages,
P tokens of a page, H heads, G kv heads, D head size, L keys of a request, S splits of the keys. One layer's cache has
the logical shape [N, 2, P, G, D] (keys, then values) and any strides that leave D dense.
"""
